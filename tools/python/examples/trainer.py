"""Trains a small Qwen3-MoE on text with transformers' Trainer: experts in lrmoe, dense parameters in DistributedDataParallel,
one gradient norm clipped over both, a schedule for both, checkpoints that resume.

    lrmoe-controller --listen 127.0.0.1:7070 --ranks 2 &
    mpirun -n 2 lrmoe-worker --controller 127.0.0.1:7070 -- python trainer.py --out out/trainer
    mpirun -n 2 lrmoe-worker --controller 127.0.0.1:7070 -- python trainer.py --out out/trainer --steps 80 --resume

The text is Python's own documentation, byte by byte, unless --text names a file.
"""

import argparse
import sys

import torch
import transformers

import lrmoe

LENGTH = 64


class Rows(torch.utils.data.Dataset):
    """Pieces of LENGTH bytes."""

    def __init__(self, path):
        if path:
            with open(path, "rb") as file:
                content = file.read()
        else:
            from pydoc_data import topics
            content = "\n".join(topics.topics.values()).encode()
        self.content = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.content) // LENGTH

    def __getitem__(self, index):
        row = self.content[index * LENGTH:(index + 1) * LENGTH]
        return {"input_ids": row, "labels": row}


def make_model():
    torch.manual_seed(0)  # equal on all ranks; each keeps its own experts
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, output_router_logits=True, max_position_embeddings=LENGTH, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2))


def make_trainer(options, worker):
    model = make_model()
    lrmoe.attach(model, worker)
    optimizer = lrmoe.JointOptimizer(torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1),
                                     lrmoe.AdamW(worker, lr=options.lr, weight_decay=0.1), max_norm=1.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, options.total_steps // 10, options.total_steps)
    arguments = transformers.TrainingArguments(
        output_dir=options.out, max_steps=options.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, max_grad_norm=0.0,
        save_strategy="steps", save_steps=options.save_steps, logging_steps=10, report_to=[], use_cpu=True,
        ddp_backend="gloo", ddp_find_unused_parameters=False, seed=1, disable_tqdm=True, dataloader_pin_memory=False)
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(options.text),
                                optimizers=(optimizer, schedule), callbacks=[lrmoe.TrainerCallback(model, worker)])


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/trainer")
    parser.add_argument("--text")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--total-steps", type=int, default=80, help="length of the learning-rate schedule")
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")
    return parser.parse_args(arguments)


def train(options):
    """Trains and saves; returns (trainer, its result)."""
    worker = lrmoe.connect()
    trainer = make_trainer(options, worker)
    result = trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()  # with the experts: opens without lrmoe
    return trainer, result


if __name__ == "__main__":
    trained, outcome = train(parse(sys.argv[1:]))
    print(f"step {outcome.global_step}: loss {outcome.training_loss:.4f}, last norm {trained.optimizer.optimizer.last_norm:.3f}")
