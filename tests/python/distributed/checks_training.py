"""On every rank: AdamW against torch.optim.AdamW, and checkpoints that continue bit for bit.

CHECK_PHASE "save" trains, saves and trains on; "load" is a fresh job that must end with the very same weights."""

import glob
import json
import os
import unittest

import numpy
import torch
import torch.distributed as dist

import lrmoe
from session import E, NUM_LAYERS, RANK, Session, batch, main

session = None
FOLDER = os.environ["CHECK_FOLDER"]


def setUpModule():
    global session
    session = Session()


def train(steps):
    for step in steps:
        session.optimizer.zero_grad()
        for index, layer in enumerate(session.layers):
            y = layer(*batch(100 + step * 2 + index, 24))
            y.pow(2).mean().backward()
        session.optimizer.step()


def open_safetensors(path):
    """{name: tensor} of a file in F32: by the safetensors library, or where it is missing by its format's rules."""
    try:
        from safetensors.torch import load_file
        return load_file(path)
    except ImportError:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            assert entry["dtype"] == "F32", entry
            begin, end = entry["data_offsets"]
            tensors[name] = torch.from_numpy(numpy.frombuffer(data[begin:end], "<f4").copy()).reshape(entry["shape"])
        return tensors


def all_weights():
    return [{expert: parts for expert, parts in layer.expert_weights().items()} for layer in session.layers]


class AdamWChecks(unittest.TestCase):
    def test_1_equals_torch_over_20_steps(self):
        settings = dict(lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
        mine = lrmoe.AdamW(session.worker, **settings)
        copies = [{expert: [w.clone().requires_grad_() for w in parts] for expert, parts in layer.items()}
                  for layer in all_weights()]
        theirs = torch.optim.AdamW([w for layer in copies for parts in layer.values() for w in parts], **settings)
        worst = 0.0
        for step in range(20):
            scale = 1.0 if step % 2 else 0.25
            mine.zero_grad()
            for index, layer in enumerate(session.layers):
                layer(*batch(step * 2 + index, 16)).pow(2).sum().backward()
                for expert, gradients in layer.expert_gradients().items():
                    for weight, gradient in zip(copies[index][expert], gradients):
                        weight.grad = gradient * scale
            mine.step(gradient_scale=scale)
            theirs.step()
            for layer, copied in zip(all_weights(), copies):
                for expert, parts in layer.items():
                    for weight, copy in zip(parts, copied[expert]):
                        error = float((weight - copy.detach()).abs().max() / copy.detach().abs().max())
                        worst = max(worst, error)
                        self.assertLess(error, 1e-6, f"step {step}, expert {expert}")
        if RANK == 0:
            print(f"AdamW: worst relative error over 20 steps {worst:.1e}", flush=True)


class CheckpointChecks(unittest.TestCase):
    def expected(self):
        return os.path.join(FOLDER, f"expected-{RANK}.pt")

    def equal(self, mine, theirs):
        for layer, other in zip(mine, theirs):
            self.assertEqual(sorted(layer), sorted(other))
            for expert, parts in layer.items():
                for weight, same in zip(parts, other[expert]):
                    self.assertTrue(torch.equal(weight, same), f"expert {expert}")

    def save_and_continue(self):
        train(range(3))
        step = session.worker.save_checkpoint(os.path.join(FOLDER, "checkpoints"))
        train(range(3, 6))
        after = all_weights()
        torch.save(after, self.expected())
        # The same again in this session.
        self.assertEqual(session.worker.load_checkpoint(os.path.join(FOLDER, "checkpoints")), step)
        train(range(3, 6))
        self.equal(all_weights(), after)

    def load_and_continue(self):
        session.worker.load_checkpoint(os.path.join(FOLDER, "checkpoints"))
        train(range(3, 6))
        self.equal(all_weights(), torch.load(self.expected()))

    def test_1_continues_bit_for_bit(self):
        if os.environ["CHECK_PHASE"] == "save":
            self.save_and_continue()
        else:
            self.load_and_continue()
        dist.barrier()

    def test_2_other_tools_open_the_weights_by_hugging_face_names(self):
        if os.environ["CHECK_PHASE"] == "load":
            self.skipTest("the other phase reads what it wrote")
        folder = os.path.join(FOLDER, "opened")
        step = session.worker.save_checkpoint(folder)
        dist.barrier()
        found = {}
        for path in glob.glob(os.path.join(folder, f"step-{step}", "model-*.safetensors")):
            tensors = open_safetensors(path)
            self.assertFalse(found.keys() & tensors.keys())
            found.update(tensors)
        self.assertEqual(len(found), 3 * E * NUM_LAYERS)
        for index, layer in enumerate(all_weights()):
            for expert, (gate_up, down) in layer.items():
                gate, up = gate_up.chunk(2)
                for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                    name = f"model.layers.{index}.mlp.experts.{expert}.{part}.weight"
                    self.assertTrue(torch.equal(found[name], weight), name)
        dist.barrier()

    def test_3_altered_checkpoint_is_refused_whole(self):
        if os.environ["CHECK_PHASE"] == "save":
            self.skipTest("the other phase needs it as it is")
        dist.barrier()
        before = all_weights()
        folder = os.path.join(FOLDER, "checkpoints")
        files = sorted(os.path.join(path, name) for path, _, names in os.walk(folder) for name in names
                       if name.endswith(".safetensors"))
        if RANK == 0:
            with open(files[-1], "r+b") as file:  # the last byte of a tensor
                file.seek(-1, os.SEEK_END)
                byte = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))
        dist.barrier()
        with self.assertRaisesRegex(lrmoe.Error, os.path.basename(files[-1])):
            session.worker.load_checkpoint(folder)
        self.equal(all_weights(), before)


if __name__ == "__main__":
    setUpModule()
    main(*((AdamWChecks,) if os.environ["CHECK_PHASE"] == "adamw" else (CheckpointChecks,)))
