"""The text the quickstart learns: bytes, split into training and validation parts, with reproducible batches."""

import glob
import math
import os
import re

import numpy as np
import torch

# Where Debian's perl-doc keeps a few megabytes of English prose.
POD_PATTERN = "/usr/share/perl/*/pod/*.pod"
MIN_BYTES = 100_000
MAX_BYTES = 8_000_000

_FORMATTING = re.compile(r"[A-Z]<{1,3}\s*([^<>]*?)\s*>{1,3}")


def plain_pod(source):
    """The prose of a POD document: commands, verbatim blocks and formatting codes removed."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", source):
        if paragraph.strip() and paragraph[0] not in "= \t":
            text = " ".join(paragraph.split())
            while True:  # codes nest
                text, count = _FORMATTING.subn(r"\1", text)
                if count == 0:
                    break
            paragraphs.append(text)
    return "\n\n".join(paragraphs)


def prepare(path, target):
    """Writes the text to learn to `target`: the file at `path`, or prose of the installed POD documents.

    Returns (description, number of bytes). Raises SystemExit with a reason when there is not enough text."""
    if path:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES)
        description = path
    else:
        documents = sorted({os.path.realpath(found) for found in glob.glob(POD_PATTERN)})
        texts = []
        for document in documents:
            with open(document, encoding="utf-8", errors="replace") as file:
                texts.append(plain_pod(file.read()))
        content = "\n\n".join(texts).encode("ascii", "ignore")[:MAX_BYTES]
        description = f"prose of {len(documents)} documents of Debian's perl-doc"
    if len(content) < MIN_BYTES:
        raise SystemExit(f"text: {len(content)} bytes from {path or POD_PATTERN}, at least {MIN_BYTES} are needed")
    with open(target, "wb") as file:
        file.write(content)
    return description, len(content)


class Text:
    """A prepared text. The last 5 % are for validation."""

    def __init__(self, path):
        content = torch.from_numpy(np.fromfile(path, dtype=np.uint8).astype(np.int64))
        cut = int(len(content) * 0.95)
        self.training, self.validation = content[:cut], content[cut:]

    def unigram_entropy(self):
        """Nats per byte: the loss of a model that knows nothing but byte frequencies."""
        counts = torch.bincount(self.training, minlength=256).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())

    @staticmethod
    def batch(content, batch_size, length, seed):
        """(inputs, targets), each [batch_size, length], a pure function of the arguments."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(content) - length - 1, (batch_size,), generator=generator)
        rows = torch.stack([content[start:start + length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def seed_of(seed, step, rank):
    """A seed of its own for each (step, rank)."""
    return (seed * 1_000_003 + step) * 4099 + rank


def perplexity(loss):
    return math.exp(min(loss, 20.0))
