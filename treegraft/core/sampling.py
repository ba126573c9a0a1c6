"""The target's distribution after sampling settings, and the noise that turns it into tokens.

The token of position t is ``argmax(logits + Gumbel(seed, t))`` (Gumbel-max, Gumbel 1954; the key is
the position, so the draw does not depend on any tree): a seeded run gives the same tokens with
every drafter, policy and budget, and without any. At temperature 0 the noise is absent.
Coins of a rejection rule and the draws of drafters have streams of their own.

Shapes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.core.processors import Place, Processors
from treegraft.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is taken from the target's logits; None or the neutral value is off.

    The order is that of transformers' ``generate``: repetition penalty, no EOS before
    ``min_new_tokens``, temperature, top-k, top-p, min-p, with ``processors`` in between.

    Attributes
    ----------
    temperature : 0 takes the argmax, 1 the target's own distribution.
    top_k : keep the k likeliest tokens (and ties of the last). top_p : keep the smallest set of
    likeliest tokens whose mass reaches p. min_p : keep tokens with at least this share of the
    likeliest one's probability. repetition_penalty : divide positive and multiply negative logits
    of every token that stands in the text before (prompt included). seed : key of the noise.
    min_new_tokens : EOS is masked until so many tokens were produced. eos : its ids.
    processors : rules of transformers and of the user, for this text alone.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    processors: Processors | None = None


TOKENS, COINS, DRAWS = 0, 1, 2
"""Streams of the noise: the target's tokens, a verifier's coins, and from 2 on one per drafter."""


_WORD = 2**64 - 1


class _Streams(threading.local):
    """A generator of each thread, to be sent to any place of any stream.

    Making one takes thirty times as long as setting its state.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)

    def raw(self, key: int, counter: int, n: int) -> NDArray[np.uint64]:
        """uint64 [n], what ``Philox(key=key, counter=counter)`` gives first; both below 2**128."""
        state: Any = {
            "bit_generator": "Philox",
            "state": {
                "counter": (counter & _WORD, counter >> 64, 0, 0),
                "key": (key & _WORD, key >> 64),
            },
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,  # nothing is left in the buffer
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._philox.state = state
        drawn: NDArray[np.uint64] = self._philox.random_raw(n)
        return drawn


_STREAMS = _Streams()


def _keyed_raw(seed: int, position: int, n: int, stream: int, number: int) -> NDArray[np.uint64]:
    return _STREAMS.raw(seed | stream << 64, position << 64 | number << 40, n)


def _uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    # 52 bits: with 53 the largest value plus a half would round to 1, and its noise be infinite.
    uniform: NDArray[np.float64] = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return uniform


def _gumbel(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = -np.log(-np.log(_uniform(raw)))
    return noise


def keyed_uniform(
    seed: int, position: int, n: int, stream: int = TOKENS, number: int = 0
) -> NDArray[np.float64]:
    """float64 [n] uniforms in (0, 1) that are a function of the four keys only.

    Philox (Salmon et al. 2011) in counter mode; numpy guarantees its raw stream across versions,
    so a seed means the same text on every machine. ``stream`` and ``number`` (below 2**24) tell
    apart what is drawn for one position. 0 and 1 never come.
    """
    return _uniform(_keyed_raw(seed, position, n, stream, number))


def keyed_gumbel(
    seed: int, position: int, vocab_size: int, stream: int = TOKENS, number: int = 0
) -> Tensor:
    """float64 [V] standard Gumbel noise that is a function of its keys (``keyed_uniform``)."""
    return torch.from_numpy(_gumbel(_keyed_raw(seed, position, vocab_size, stream, number)))


def keyed_top(
    scores: NDArray[np.floating[Any]],
    k: int,
    seed: int,
    position: int,
    stream: int = TOKENS,
    number: int = 0,
) -> NDArray[np.int64]:
    """int64 [k]: the highest of ``scores`` [V] plus ``keyed_gumbel``, in falling order.

    Draws without replacement from softmax(scores) in their order (Gumbel top-k; Kool et al. 2019).
    The noise is rounded to the type of ``scores`` before it is added. NaN counts as highest.
    """
    return _noisy_top(scores, k, _keyed_raw(seed, position, scores.shape[0], stream, number))


def _noisy_top(
    scores: NDArray[np.floating[Any]], k: int, raw: NDArray[np.uint64]
) -> NDArray[np.int64]:
    # The noise of most tokens need not be known: none is above the noise of the highest uniform, so
    # a score that falls short of the k-th noisy score by more than that cannot win.
    likely = np.array([scores.argmax()]) if k == 1 else np.argpartition(scores, -k)[-k:]
    reached = float((scores[likely] + _gumbel(raw[likely])).min())
    most = float(_gumbel(raw.max()[None])[0])
    floor = reached - most - 1e-3 - 1e-6 * abs(reached)  # and nothing is lost to rounding
    able = (scores >= floor).nonzero()[0]
    if able.shape[0] < k:  # NaN
        able = np.arange(scores.shape[0])
    noisy = scores[able] + _gumbel(raw[able]).astype(scores.dtype)
    if k == 1:
        return able[[noisy.argmax()]]
    return able[np.argsort(-noisy, kind="stable")[:k]]


@dataclass(slots=True)
class Noise:
    """Keyed noise of one text."""

    seed: int
    vocab_size: int

    def at(self, position: int) -> Tensor:
        """float64 [V] Gumbel noise of the token that stands at ``position`` of the text."""
        return keyed_gumbel(self.seed, position, self.vocab_size)

    def token(self, position: int, scores: Tensor) -> int:
        """The token at ``position``: the highest of float [V] ``scores`` plus the noise there."""
        return int(keyed_top(scores.cpu().numpy(), 1, self.seed, position)[0])

    def coin(self, position: int, number: int) -> float:
        """Uniform in (0, 1): the coin ``number`` that a verifier tosses at ``position``."""
        return float(keyed_uniform(self.seed, position, 1, COINS, number)[0])


@dataclass(slots=True)
class History:
    """The committed text, as far as sampling settings look at it."""

    tokens: list[int]
    n_prompt: int
    _seen: Tensor | None = None
    _ids: Tensor | None = None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        new = list(tokens)
        self.tokens.extend(new)
        if self._seen is not None:
            self._seen[new] = True

    def seen(self, vocab_size: int) -> Tensor:
        """bool [V]: which ids stand in the text. Not to be written to."""
        if self._seen is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[self.tokens] = True
        return self._seen

    def ids(self, path: Sequence[int], device: torch.device) -> Tensor:
        """int64 [1, n]: the text and ``path`` after it, in memory of its own."""
        old = self._ids if self._ids is not None else torch.empty(0, dtype=torch.int64)
        new = torch.tensor(self.tokens[old.shape[0] :], dtype=torch.int64, device=device)
        self._ids = torch.cat([old.to(device), new])
        return torch.cat([self._ids, torch.tensor(path, dtype=torch.int64, device=device)])[None]


def process(
    logits: Tensor, sampling: Sampling, history: History, path: Sequence[int] = ()
) -> Tensor:
    """Apply all settings but the temperature-0 argmax to one row of logits.

    Parameters
    ----------
    logits : float [V], the target's logits after the text and ``path``; left as it is.
    path : tokens between the committed text and this place (a node's path in the tree).

    Returns
    -------
    float [V] logits, -inf where a token is excluded; float32 after other people's processors, which
    rely on what transformers hands them. One entry at least is finite unless ``eos`` covers the
    vocabulary before ``min_new_tokens``.

    Raises
    ------
    ProcessorError : one of ``sampling.processors`` failed, or they exclude every token.
    """
    if sampling.processors is not None:
        return _process_with(sampling.processors, logits, sampling, history, path)
    logits = _penalise(logits, sampling, history, path)
    logits = _withhold_end(logits, sampling, history, path)
    if sampling.temperature == 0.0:
        return logits
    return _truncate(logits, _scale(logits, sampling), sampling)


def _process_with(
    processors: Processors,
    logits: Tensor,
    sampling: Sampling,
    history: History,
    path: Sequence[int],
) -> Tensor:
    """The same with other people's processors where ``generate`` has them."""
    processors.visit(history.tokens, path)
    ids = history.ids(path, logits.device)

    def apply(place: Place, row: Tensor) -> Tensor:
        return processors.apply(place, ids, row[None])[0]

    # A copy, as theirs: a processor may write to what it is given, and the target's rows are read
    # again for the drafters.
    row = apply(Place.BEFORE_PENALTY, logits.to(torch.float32, copy=True))
    row = apply(Place.AFTER_PENALTY, _penalise(row, sampling, history, path))
    row = apply(Place.AFTER_MINIMUM, _withhold_end(row, sampling, history, path))
    sampled = sampling.temperature != 0.0
    processors.check_open(ids, logits, row, sampled)
    if sampled:
        scaled = apply(Place.AFTER_TEMPERATURE, _scale(row, sampling))
        raw = row.masked_fill(scaled.isneginf(), -torch.inf)
        row = apply(Place.AFTER_MIN_P, _truncate(raw, scaled, sampling))
    row = apply(Place.LAST, row)
    processors.check_open(ids, logits, row, sampled)
    return row


def _penalise(logits: Tensor, sampling: Sampling, history: History, path: Sequence[int]) -> Tensor:
    if sampling.repetition_penalty == 1.0:
        return logits
    seen = history.seen(logits.shape[-1])
    if path:
        seen = seen.clone()
        seen[list(path)] = True
    penalised = torch.where(
        logits < 0,
        logits * sampling.repetition_penalty,
        logits / sampling.repetition_penalty,
    )
    return torch.where(seen.to(logits.device), penalised, logits)


def _withhold_end(
    logits: Tensor, sampling: Sampling, history: History, path: Sequence[int]
) -> Tensor:
    n_new = len(history.tokens) - history.n_prompt + len(path)
    if n_new < sampling.min_new_tokens and sampling.eos:
        logits = logits.clone()
        logits[list(sampling.eos)] = -torch.inf
    return logits


def _scale(raw: Tensor, sampling: Sampling) -> Tensor:
    # Subtracting the maximum first keeps a tiny temperature from overflowing; below 1e-30 nothing
    # changes any more, and float32 would round the temperature itself to 0.
    return (raw - raw.max()) / max(sampling.temperature, 1e-30)


def _truncate(raw: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, top-p and min-p of ``logits``, which are ``raw`` after the temperature."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        # On the raw logits: the subtraction rounds, and would make ties of close ones.
        floor = raw.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(raw < floor, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        rising, order = logits.sort(stable=True)
        below = rising.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        below[-1] = False
        logits = logits.masked_fill(torch.zeros_like(below).scatter(0, order, below), -torch.inf)
    if sampling.min_p is not None and sampling.min_p > 0.0:
        # The maximum is 0 after the shift, so the floor on p / p_max is a floor on the logit.
        logits = logits.masked_fill(logits.exp() < sampling.min_p, -torch.inf)
    return logits


def highest(logits: Tensor) -> int:
    """Index of the highest of float [V]; the first one on ties, and NaN before all."""
    # On the host numpy's argmax takes a tenth of torch's; elsewhere one number is to be copied.
    return int(logits.numpy().argmax() if logits.is_cpu else logits.argmax())


@dataclass(slots=True)
class TargetDistribution:
    """What the target says after every node of a tree, on demand and one node at a time.

    Rows are processed only where a verifier looks: a walk visits the accepted path, and sorting
    the vocabulary for nodes off that path would cost more than it tells.

    Attributes
    ----------
    logits : float [N, V], raw logits after each node of ``tree``.
    """

    logits: Tensor
    tree: TokenTree
    sampling: Sampling
    history: History
    noise: Noise
    _rows: dict[int, Tensor] = field(default_factory=dict, init=False)

    def processed(self, index: int) -> Tensor:
        """float [V] logits after node ``index`` under the sampling settings, unnormalised.

        Not to be written to. Below a token that ends the text, which nobody commits, other people's
        processors are not asked, and the row is the raw one.
        """
        processors = self.sampling.processors
        if processors is None:
            # Walking up the tree for each row costs more than its argmax.
            path = self.tree.path(index) if self._looks_back() else ()
            return process(self.logits[index], self.sampling, self.history, path)
        path = self.tree.path(index)
        # Kept, because a processor is asked about a place only once.
        if index not in self._rows:
            row = self.logits[index]
            if not processors.ended(path, self.sampling.eos):
                row = process(row, self.sampling, self.history, path)
            self._rows[index] = row
        return self._rows[index]

    def _looks_back(self) -> bool:
        """Whether a setting other than a processor depends on the path to a node."""
        sampling = self.sampling
        return sampling.repetition_penalty != 1.0 or sampling.min_new_tokens > 0

    def position(self, index: int) -> int:
        """Place in the text of the token that follows node ``index``."""
        return len(self.history.tokens) + self.tree.lists().depth[index]

    def token(self, index: int) -> int:
        """The one token that the target takes after node ``index``."""
        logits = self.processed(index)
        if self.sampling.temperature != 0.0:
            return self.noise.token(self.position(index), logits)
        return highest(logits)

    def probabilities(self, index: int) -> Tensor:
        """float64 [V] on the host: law of the token after node ``index`` (one-hot if greedy)."""
        logits = self.processed(index)
        if self.sampling.temperature == 0.0:
            law = torch.zeros(logits.shape[-1], dtype=torch.float64)
            law[highest(logits)] = 1.0
            return law
        scores = logits.cpu().numpy().astype(np.float64)
        with np.errstate(invalid="ignore"):  # where every token is excluded
            law = np.exp(scores - scores.max())
        law /= law.sum()
        return torch.from_numpy(law)
