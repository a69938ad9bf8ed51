"""What every check on real workers needs: ranks that talk to each other, and random inputs equal on all of them."""

import os
import sys
import traceback
import unittest

import torch
import torch.distributed as dist

import lrmoe

E, K, H, F = 6, 2, 32, 24
NUM_LAYERS = 2

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}[os.environ["CHECK_DTYPE"]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[DTYPE]
RATE = float(os.environ["CHECK_RATE"])


def gathered(value):
    """[value of rank 0, value of rank 1, ...]"""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def rounded(tensor):
    """The value the compute type holds, in fp32."""
    return tensor.to(DTYPE).float()


def generator(seed):
    return torch.Generator().manual_seed(seed)


def expert_weights(seed):
    g = generator(seed)
    return torch.randn(E, 2 * F, H, generator=g) * 0.3, torch.randn(E, H, F, generator=g) * 0.3


def batch(seed, num_tokens, rank=RANK):
    """x, ids, alpha of this rank's tokens; x in the compute type."""
    g = generator(seed * 64 + rank)
    ids = torch.rand(num_tokens, E, generator=g).topk(K, dim=-1).indices
    alpha = torch.rand(num_tokens, K, generator=g) + 0.1
    return torch.randn(num_tokens, H, generator=g).to(DTYPE).requires_grad_(), ids, alpha.requires_grad_()


class Session:
    """One per process: a job has one model."""

    def __init__(self):
        self.worker = lrmoe.connect()
        self.layers = [lrmoe.MoELayer(self.worker, index, E, K, H, F, dtype=DTYPE) for index in range(NUM_LAYERS)]
        self.weights = [expert_weights(index) for index in range(NUM_LAYERS)]
        self.reload()
        self.optimizer = lrmoe.AdamW(self.worker)

    def reload(self):
        for layer, weights in zip(self.layers, self.weights):
            layer.load_experts(*weights)


class RankResult(unittest.TextTestResult):
    """A failure on one rank leaves the others in a collective call: end the job at once, having said why."""

    def addFailure(self, test, error):
        self._end(test, error)

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self._end(subtest, error)

    def _end(self, test, error):
        print(f"rank {RANK}: {test} FAILED\n{''.join(traceback.format_exception(*error))}", file=sys.stderr, flush=True)
        os._exit(1)


def main(*cases):
    """Runs the test cases on every rank in step; rank 0 says how many passed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
    with open(os.devnull, "w") as nowhere:
        result = unittest.TextTestRunner(stream=nowhere, resultclass=RankResult).run(suite)
    dist.barrier()
    if RANK == 0:
        print(f"{result.testsRun - len(result.skipped)} checks passed", flush=True)
    sys.stdout.flush()
    os._exit(0)
