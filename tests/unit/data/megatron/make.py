"""Writes this folder's files with megatron-core's own builder, and what its own reader says of them.

Run it where megatron-core is installed: python make.py. It was run with megatron-core 0.16.1.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

HERE = Path(__file__).parent
CASES = {"one": (np.int32, 128_256), "several": (np.int32, 128_256), "narrow": (np.uint16, 50_257)}
"""By name the dtype and the vocabulary; the documents of `several` have more than one sequence."""
answers = {}
for seed, (name, (dtype, vocab)) in enumerate(CASES.items()):
    rng, prefix = np.random.default_rng(seed), str(HERE / name)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    for length in rng.integers(1, 60, 12):
        builder.add_item(torch.from_numpy(rng.integers(0, vocab, length).astype(np.int64)))
        if name != "several" or rng.random() < 0.5:
            builder.end_document()
    builder.end_document()
    builder.finalize(prefix + ".idx")
    read = IndexedDataset(prefix)
    bounds = read.document_indices.tolist()
    documents = [np.concatenate([read[i] for i in range(a, b)]).tolist() for a, b in pairwise(bounds) if b > a]
    answers[name] = documents
(HERE / "answers.json").write_text(json.dumps(answers))
