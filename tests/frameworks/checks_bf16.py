"""On every rank: a bfloat16 model attached against the same model left alone, and nothing of it lost on the way back."""

import unittest

import torch

import families
import lrmoe
from session import RANK, main

worker = lrmoe.connect()


class Bf16(unittest.TestCase):
    def test_attach_and_detach(self):
        plain, model = (families.make("qwen3_moe", dtype=torch.bfloat16) for _ in range(2))
        self.assertEqual(lrmoe.attach(model, worker)[0].dtype, torch.bfloat16)
        ids = families.batch(1, RANK)
        outputs = []
        for each in (model, plain):
            out = each(input_ids=ids, labels=ids)
            out.loss.backward()
            outputs.append(out.logits.detach().float())
        errors = (outputs[0] - outputs[1]).abs().amax(dim=-1).flatten() / outputs[1].abs().max()
        # Rounding differs, and so may a token's experts where two are as good: most tokens, not all.
        self.assertLess(float(errors.median()), 2e-2)
        lrmoe.gather(model)
        gathered = model.state_dict()
        lrmoe.detach(model)
        for state in (gathered, model.state_dict()):
            self.assertEqual(sorted(state), sorted(plain.state_dict()))
            for name, value in plain.state_dict().items():
                self.assertEqual(state[name].dtype, value.dtype, name)
                self.assertTrue(torch.equal(state[name], value), name)


if __name__ == "__main__":
    main(Bf16)
