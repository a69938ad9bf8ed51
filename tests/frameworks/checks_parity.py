"""On every rank: an attached model against the same model left alone. CHECK_FAMILY names the family.

The plain model's gradients are averaged over ranks, as data parallelism does; so are the attached model's dense ones,
and the experts step with gradient_scale = 1 / world size."""

import os
import unittest

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import families
import lrmoe
from session import RANK, WORLD_SIZE, gathered, main

FAMILY = os.environ["CHECK_FAMILY"]
TOLERANCE = 1e-4
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
worker = lrmoe.connect()
worst = {}


def average(model):
    """Gradients over ranks; one that this rank did not need is zero."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE


def expert_parts(model, layer_names):
    """[(gate_up [E, 2F, H], down [E, H, F])] of a plain model: gradients."""
    parts = []
    for name in layer_names:
        experts = model.get_submodule(name)
        if hasattr(experts, "gate_up_proj"):
            parts.append((experts.gate_up_proj.grad, experts.down_proj.grad))
            continue
        names = ("gate_proj", "up_proj", "down_proj") if hasattr(experts[0], "gate_proj") else ("w1", "w3", "w2")
        gate, up, down = (torch.stack([getattr(e, n).weight.grad for e in experts]) for n in names)
        parts.append((torch.cat([gate, up], dim=1), down))
    return parts


class Parity(unittest.TestCase):
    def setUp(self):
        self.plain = families.make(FAMILY)
        self.model = families.make(FAMILY)
        self.names = [name for name, module in self.plain.named_modules() if name.split(".")[-1] == "experts"]
        self.layers = lrmoe.attach(self.model, worker)
        self.experts = lrmoe.AdamW(worker, **SETTINGS)
        self.experts.zero_grad()

    def tearDown(self):
        if self.layers:
            lrmoe.detach(self.model)

    def close(self, name, mine, theirs, tolerance=TOLERANCE):
        """Equal up to the tolerance, relative to the largest element."""
        self.assertEqual(tuple(mine.shape), tuple(theirs.shape), name)
        self.assertTrue(bool(torch.isfinite(mine).all()), name)
        error = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
        kind = name.split(":")[0]
        worst[kind] = max(worst.get(kind, 0.0), error)
        self.assertLess(error, tolerance, name)

    def run_both(self, *batches, models=None, **kwargs):
        """(loss, logits) of the attached and the plain model for the last batch, after backward passes of all."""
        results = []
        for model in models or (self.model, self.plain):
            for ids in batches:
                out = model(input_ids=ids, labels=ids, **kwargs)
                (out.loss / len(batches)).backward()
            results.append((out.loss.detach(), out.logits.detach()))
        for model in (self.model, self.plain):
            average(model)
        return results

    def compare(self, results):
        (loss, logits), (plain_loss, plain_logits) = results
        self.close("loss", loss, plain_loss)
        self.close("logits", logits, plain_logits)
        mine = dict(self.model.named_parameters())
        for name, parameter in self.plain.named_parameters():
            if name in mine and parameter.requires_grad:
                self.close(f"dense gradients: {name}", mine[name].grad, parameter.grad)
        for layer, (gate_up, down) in zip(self.layers, expert_parts(self.plain, self.names)):
            for expert, parts in layer.expert_gradients().items():
                # Relative to the largest gradient of any expert: one with a single row may be tiny.
                for found, wanted in zip(parts, (gate_up, down)):
                    top = wanted.abs().max()
                    self.close("expert gradients", torch.stack([found / WORLD_SIZE, top.expand_as(found)]),
                               torch.stack([wanted[expert], top.expand_as(found)]))

    def zero(self):
        for model in (self.model, self.plain):
            model.zero_grad()
        self.experts.zero_grad()

    def steps(self, count):
        """Trains both; every step's loss and logits equal, and the weights at the end."""
        optimizers = [torch.optim.AdamW(model.parameters(), **SETTINGS) for model in (self.model, self.plain)]
        for step in range(count):
            self.zero()
            results = self.run_both(families.batch(step, RANK))
            for optimizer in optimizers:
                optimizer.step()
            self.experts.step(gradient_scale=1 / WORLD_SIZE)
            self.close("loss over steps", results[0][0], results[1][0])
            self.close("logits over steps", results[0][1], results[1][1])

    def test_1_parity(self):
        self.assertEqual(len(self.layers), len(self.names))
        for name, _ in self.model.named_parameters():
            self.assertFalse(any(name.startswith(experts + ".") for experts in self.names), name)
        self.compare(self.run_both(families.batch(100, RANK)))

    def test_2_training_steps_state_dict_and_detach(self):
        self.steps(10)
        if WORLD_SIZE > 1:
            with self.assertRaisesRegex(lrmoe.Error, "gather"):
                self.model.state_dict()
        lrmoe.gather(self.model)
        self.compare_weights("state dict", self.model.state_dict())
        self.check_save_pretrained()
        lrmoe.detach(self.model)
        self.layers = None
        self.compare_weights("detached", self.model.state_dict())
        with torch.no_grad():  # alive again, without a worker
            ids = families.batch(50, RANK)
            self.close("logits, detached", self.model(input_ids=ids).logits, self.plain(input_ids=ids).logits)

    def compare_weights(self, what, mine):
        theirs = self.plain.state_dict()
        self.assertEqual(sorted(mine), sorted(theirs))
        for name, value in theirs.items():
            self.close(f"{what}: {name}", mine[name].float(), value.float())

    def check_save_pretrained(self):
        folder = os.path.join(os.environ["CHECK_FOLDER"], f"{FAMILY}-{WORLD_SIZE}")
        lrmoe.gather(self.model, ranks=[0])
        if RANK == 0:
            self.model.save_pretrained(folder)
            # The very files that the plain model gives.
            self.plain.save_pretrained(folder + "-plain")
            self.assertEqual(*(sorted(load_file(os.path.join(path, "model.safetensors")))
                               for path in (folder, folder + "-plain")))
        dist.barrier()
        again = type(self.plain).from_pretrained(folder, attn_implementation="eager")
        self.compare_weights("saved and reloaded", again.state_dict())

    def test_3_gradient_checkpointing(self):
        for reentrant in (False, True):
            with self.subTest(reentrant=reentrant):
                self.zero()
                for model in (self.model, self.plain):
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
                    model.enable_input_require_grads()
                before = worker._micro_batches.get(self.layers[0].layer, 0)
                results = self.run_both(families.batch(7, RANK), use_cache=False)
                # Made twice, counted once.
                self.assertEqual(worker._micro_batches[self.layers[0].layer], before + 1)
                self.compare(results)

    def test_4_accumulation(self):
        # Ranks differ in their numbers of tokens.
        self.compare(self.run_both(*(families.batch(seed, RANK, size=1 + (RANK + seed) % 2) for seed in (31, 32, 33))))

    def test_5_evaluation_and_no_grad(self):
        ids = families.batch(9, RANK)
        with torch.no_grad():
            self.close("logits, no_grad", self.model(input_ids=ids).logits, self.plain(input_ids=ids).logits)
        for model in (self.model, self.plain):
            model.eval()
        out = self.model(input_ids=ids).logits
        self.close("logits, eval", out.detach(), self.plain(input_ids=ids).logits.detach())
        if any(p.requires_grad for p in self.model.parameters()):
            with self.assertRaisesRegex(lrmoe.Error, "eval"):
                out.sum().backward()

    def test_6_generate(self):
        for model in (self.model, self.plain):
            model.eval()
        ids = families.batch(11, RANK, size=2, length=5)
        length = 5 + 2 * RANK  # ranks that are done go on with the others: synced_gpus
        settings = dict(max_new_tokens=length, min_new_tokens=length, do_sample=False,
                        attention_mask=torch.ones_like(ids), output_router_logits=False)  # version 4 cannot with a cache
        mine = self.model.generate(ids, synced_gpus=WORLD_SIZE > 1, **settings)
        self.assertEqual(mine.tolist(), self.plain.generate(ids, **settings).tolist())

    def test_7_autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (_, logits), (_, plain_logits) = self.run_both(families.batch(13, RANK))
        # Rounding differs, and so may a token's experts where two are as good: most tokens, not all.
        errors = (logits - plain_logits).float().abs().amax(dim=-1).flatten() / plain_logits.float().abs().max()
        self.assertLess(float(errors.median()), 0.05)
        for parts in self.layers[0].expert_gradients().values():
            self.assertTrue(all(bool(torch.isfinite(part).all()) for part in parts))

    def test_8_load_state_dict(self):
        other = families.make(FAMILY, seed=5)
        self.model.load_state_dict(other.state_dict())
        ids = families.batch(15, RANK)
        with torch.no_grad():
            self.close("logits, loaded", self.model(input_ids=ids).logits, other(input_ids=ids).logits)

    def test_9_compile(self):
        torch._dynamo.reset()
        compiled = torch.compile(self.model, backend="aot_eager")
        self.compare(self.run_both(families.batch(17, RANK), models=(compiled, self.plain), use_cache=False))


class WorstErrors(unittest.TestCase):
    def test_report(self):
        everything = gathered(worst)
        if RANK == 0:
            print(f"worst {FAMILY} ({families.form(families.make(FAMILY))}, {WORLD_SIZE} ranks): " + ", ".join(
                f"{name} {max(w.get(name, 0.0) for w in everything):.1e}" for name in worst), flush=True)


if __name__ == "__main__":
    main(Parity, WorstErrors)
