"""On every rank: the Trainer example, uninterrupted and resumed. CHECK_PHASE "through" trains 8 steps with a checkpoint at
4; "resumed" is a fresh job that starts from there and must end with the same weights."""

import os
import shutil
import unittest

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import lrmoe
import trainer as example
from session import RANK, main

FOLDER = os.path.join(os.environ["CHECK_FOLDER"], "trainer")


def options(resume):
    more = ["--resume"] if resume else []
    return example.parse(["--out", FOLDER, "--steps", "8", "--total-steps", "8", "--save-steps", "4", *more])


class TrainerChecks(unittest.TestCase):
    def through(self):
        trained, result = example.train(options(resume=False))
        self.assertEqual(result.global_step, 8)
        losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
        self.assertTrue(losses or result.training_loss > 0)
        joint = trained.optimizer.optimizer
        self.assertGreater(joint.last_norm, 0.0)
        self.assertEqual(joint.dense.param_groups[0]["lr"], joint.experts.param_groups[0]["lr"])
        self.assertLess(joint.experts.param_groups[0]["lr"], 3e-3)  # the schedule reached the experts
        dist.barrier()
        if RANK == 0:  # what was saved opens without lrmoe, and computes the same
            plain = transformers.Qwen3MoeForCausalLM.from_pretrained(FOLDER)
            self.assertFalse(any(isinstance(m, lrmoe.MoELayer) for m in plain.modules()))
            os.rename(os.path.join(FOLDER, "checkpoint-8"), os.path.join(FOLDER, "expected-8"))
            torch.save(plain.state_dict(), os.path.join(FOLDER, "expected.pt"))
        dist.barrier()

    def resumed(self):
        if int(transformers.__version__.split(".")[0]) < 5:
            self.skipTest("with several CPU processes transformers 4 restores its optimizer to \"cpu:0\", which PyTorch refuses")
        example.train(options(resume=True))
        dist.barrier()
        if RANK == 0:
            for name in ("checkpoint-8", "expected-8"):
                self.assertTrue(os.path.isdir(os.path.join(FOLDER, name, "experts")), name)
            mine, theirs = (load_file(os.path.join(FOLDER, name, "model.safetensors"))
                            for name in ("checkpoint-8", "expected-8"))
            self.assertEqual(sorted(mine), sorted(theirs))
            for name, value in theirs.items():
                self.assertTrue(torch.equal(mine[name], value), name)
            shutil.rmtree(FOLDER)
        dist.barrier()

    def test_trainer(self):
        {"through": self.through, "resumed": self.resumed}[os.environ["CHECK_PHASE"]]()


if __name__ == "__main__":
    main(TrainerChecks)
