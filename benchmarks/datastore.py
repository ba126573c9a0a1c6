"""How long a datastore takes to build and a look-up in it takes.

    python benchmarks/datastore.py --tokens 10000000
    python benchmarks/datastore.py --store DIR

Without a store one is made of synthetic text: words drawn by Zipf's law that follow each other by
a fixed random grammar, with long passages repeated, as real text has them. Look-ups are those of
the drafter with its defaults, after contexts cut out of the corpus (a long match), and after the
same contexts with a foreign token near the end (a short one).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter, thread_time

import numpy as np
import torch

from treegraft.backends.datastore import Datastore, open_datastore
from treegraft.backends.datastore_writer import DatastoreWriter
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Context
from treegraft.policies.drafters.datastore import DatastoreConfig, DatastoreDrafter

VOCAB = 32_000


def synthetic(n_tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of 5000 tokens; a third of each is copied from an earlier place."""
    dice = np.random.default_rng(seed)
    n_documents = max(1, n_tokens // 5000)
    tokens = dice.zipf(1.3, n_documents * 5000) % VOCAB
    # Half the tokens are decided by the one before, so that bigrams repeat.
    follows = dice.integers(0, VOCAB, VOCAB)
    decided = dice.random(tokens.shape[0]) < 0.5
    decided[0] = False
    tokens[decided] = follows[tokens[np.flatnonzero(decided) - 1]]
    documents = tokens.reshape(n_documents, 5000)
    for i in range(1, n_documents):
        source, start = dice.integers(0, i), dice.integers(0, 3300)
        documents[i, start : start + 1650] = documents[source, start : start + 1650]
    return list(documents)


def build(folder: Path, n_tokens: int) -> None:
    documents = synthetic(n_tokens)
    start = perf_counter()
    with DatastoreWriter(folder, VOCAB) as writer:
        for document in documents:
            writer.add(document)
        writer.finish()
    seconds = perf_counter() - start
    print(f"sort and write: {seconds:.1f} s, {seconds / n_tokens * 1e6:.2f} s per M tokens")


def contexts(store: Datastore, n: int, length: int) -> list[list[int]]:
    """Token sequences of ``length`` that stand within one document."""
    dice = np.random.default_rng(1)
    n_suffixes = store.header.n_tokens + store.header.n_documents
    found: list[list[int]] = []
    while len(found) < n:
        rows = store.following(dice.integers(0, n_suffixes, n), 0, length)
        found += [row.tolist() for row in rows if row.min() >= 0]
    return found[:n]


def measure(store: Datastore, config: DatastoreConfig, texts: list[list[int]], label: str) -> None:
    drafter = DatastoreDrafter(config, store)
    tree = TensorTree(store.vocab_size)
    root = torch.tensor([0])
    # Of this thread alone, or a busy machine would show as slow look-ups.
    seconds, n_paths = [], 0
    for text in texts:
        tree.reset_(text[-1], 99)
        drafter.begin(Context(text, 10_000, store.vocab_size, None))
        start = thread_time()
        proposals = drafter.propose(tree, root, 10)
        seconds.append(thread_time() - start)
        n_paths += proposals.positions.shape[0]
    ms = np.array(seconds) * 1e3
    tenth, last = np.quantile(ms, 0.9), np.quantile(ms, 0.99)
    print(
        f"{label}, CPU ms a look-up: median {np.median(ms):.3f}, 90 % {tenth:.3f}, "
        f"99 % {last:.3f}; {n_paths / len(texts):.1f} paths"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--store", type=Path, help="a datastore; default: a synthetic one")
    options.add_argument("--tokens", type=int, default=10_000_000, help="of the synthetic one")
    options.add_argument("--lookups", type=int, default=2000)
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.store or Path(temporary, "store")
        if given.store is None:
            build(folder, given.tokens)
        start = perf_counter()
        store = open_datastore(folder)
        opened = perf_counter() - start
        print(f"open: {opened * 1e3:.1f} ms; {store.header.n_tokens} tokens")
        config = DatastoreConfig(path=str(folder))
        texts = contexts(store, given.lookups, config.max_n)
        measure(store, config, texts, "long match")
        measure(store, config, [[*t[:-3], 0, *t[-2:]] for t in texts], "short match")


if __name__ == "__main__":
    main()
