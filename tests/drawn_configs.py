"""Hypothesis strategies for whole pipelines: models, a config that fits them, and a prompt.

``PARTS`` holds a strategy for every kind of every role; a new kind is one more line there. What a
part must know about its pipeline to be drawn so that it fits is in ``Room``.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from table_models import (
    TableHead,
    hashed_model,
    holed_model,
    looping_model,
    mixed_model,
    tied_model,
)
from torch import Tensor
from toy_tokenizers import PieceTokenizer

from treegraft import parse_config
from treegraft.backends.datastore_writer import DatastoreWriter
from treegraft.backends.reference import plain_tokens
from treegraft.core.draft_head import DraftHead
from treegraft.core.language_model import LanguageModel
from treegraft.core.sampling import Sampling

Options = dict[str, Any]
LogitsAfter = Callable[[Sequence[int]], Tensor]

PIECES = ("a", "b", "ab", "c", " ", "", "ba", "é", "cc")
STRINGS = ("ab", "ba", "cc", "a b", "é", "<5>", "bbb", "aéb")
SEEDS = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))


@dataclass(frozen=True)
class Room:
    """What the parts of one pipeline are drawn to fit.

    ``models`` by the names that configs use, the target's being ``target``; ``heads`` are draft
    heads for that target, by name; ``after`` gives the
    target's logits after a whole text; ``argmax_key`` the seed and order of ``hashed_model`` if the
    target's likeliest tokens are those of one.
    """

    vocab: int
    models: Mapping[str, LanguageModel]
    after: LogitsAfter = field(repr=False)
    argmax_key: tuple[int, int] | None = None
    heads: Mapping[str, DraftHead] = field(default_factory=dict)
    n_drafters: int = 0
    depth: int = 0
    width: int = 1

    @property
    def limit(self) -> int | None:
        return self.models["target"].max_positions


@dataclass(frozen=True)
class Case:
    """A pipeline and a prompt, with the models that both are about."""

    config: Options
    room: Room
    prompt: list[int]

    @property
    def refused(self) -> bool:
        """Whether the prompt leaves no room for a new token."""
        return self.room.limit is not None and len(self.prompt) >= self.room.limit

    @property
    def remembers(self) -> bool:
        """Whether a text is drafted otherwise after another one; tokens are the same."""
        keeps = any(d.get("keep") or d.get("store_tokens") for d in self.config["drafters"])
        keeps = keeps or self.config.get("fallback") == "auto"
        return keeps or self.config["scheduler"]["kind"] in {"cost_aware", "online"}

    @property
    def exact(self) -> bool:
        """Whether the tokens, and not only their law, are those of plain decoding."""
        return parse_config(self.config).same_tokens


def options(kind: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Options]:
    """A config of ``kind`` that gives some of its options and leaves the rest to the defaults."""
    return st.fixed_dictionaries({"kind": st.just(kind)}, optional=optional)


def own(kind: str, **params: st.SearchStrategy[Any]) -> st.SearchStrategy[Options]:
    """A class by import path, with all of ``params``."""
    given = st.fixed_dictionaries(params)
    return st.fixed_dictionaries({"kind": st.just(kind), "params": given})


# --- the parts ------------------------------------------------------------------------------------


def ngram(room: Room) -> st.SearchStrategy[Options]:
    n = st.integers(1, 5)
    lengths = st.tuples(n, n).map(sorted)
    return st.builds(
        lambda ns, length, more: (
            {"kind": "ngram", "min_n": ns[0], "max_n": ns[1], "length": length}
            | ({"long_length": length + more} if more else {})
        ),
        lengths,
        st.integers(1, 7),
        st.integers(0, 9),
    )


def lm(room: Room) -> st.SearchStrategy[Options]:
    required = {"kind": st.just("lm"), "model": st.sampled_from(sorted(room.models))}
    optional = {
        "read_ahead": st.integers(0, 9),
        "children": st.sampled_from(["topk", "sample", "topk_plus_one_sample"]),
        "draw_temperature": st.one_of(st.none(), st.floats(0.1, 3.0)),
    }
    return st.fixed_dictionaries(required, optional=optional)


def head(room: Room) -> st.SearchStrategy[Options]:
    named = {"kind": st.just("head"), "model": st.sampled_from(sorted(room.heads))}
    return lm(room).flatmap(lambda lm: st.fixed_dictionaries(named).map(lambda own: lm | own))


def suffix(room: Room) -> st.SearchStrategy[Options]:
    n = st.integers(1, 9)
    return st.builds(
        lambda ns, **more: {"kind": "suffix", "min_match": ns[0], "max_match": ns[1], **more},
        st.tuples(n, n).map(sorted),
        factor=st.sampled_from([0.5, 1.0, 2.0, 9.0]),
        length=st.integers(1, 9),
        min_share=st.sampled_from([0.0, 0.1, 1.0]),
        store_tokens=st.sampled_from([0, 0, 30]),
    )


@cache
def corpus(vocab: int) -> str:
    """A store of de Bruijn-like texts: every pair of ids stands in it, with something after it."""
    folder = Path(tempfile.mkdtemp(prefix="treegraft-store-")) / "store"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    with DatastoreWriter(folder, vocab) as writer:
        for step in range(1, vocab + 1):
            writer.add([(i * step + i // vocab) % vocab for i in range(3 * vocab)])
        writer.finish()
    return str(folder)


def datastore(room: Room) -> st.SearchStrategy[Options]:
    n = st.integers(1, 6)
    return st.builds(
        lambda ns, **more: {"kind": "datastore", "min_n": ns[0], "max_n": ns[1], **more},
        st.tuples(n, n).map(sorted),
        path=st.builds(corpus, st.just(room.vocab)),
        length=st.integers(1, 9),
        paths=st.integers(1, 9),
        occurrences=st.integers(1, 9),
    )


def oracle(room: Room, kind: str) -> st.SearchStrategy[Options]:
    """A drafter that knows the greedy target, as far as a hashed model can."""
    seed, order = room.argmax_key or (0, 2)
    known = {"seed": st.just(seed), "order": st.just(order), "vocab_size": st.just(room.vocab)}
    return own(f"adversarial_drafters:{kind}", **known)


def script(room: Room, kind: str) -> st.SearchStrategy[Options]:
    """Any paths with any score; more paths than were asked for would be refused."""
    path = st.lists(st.integers(-2, room.vocab + 1), max_size=7)
    return own(
        f"adversarial_drafters:{kind}",
        paths=st.lists(path, max_size=min(room.width, 5)),
        score=st.floats(allow_nan=True, width=32),
    )


def fixed(room: Room) -> st.SearchStrategy[Options]:
    if not room.n_drafters or not room.depth:
        return st.nothing()
    numbers = st.integers(0, room.n_drafters - 1)
    # By name or by number.
    calls = st.one_of(numbers, numbers.map(lambda i: f"d{i}"))
    listed = st.lists(calls, min_size=1, max_size=room.depth)
    return st.fixed_dictionaries({"kind": st.just("fixed"), "calls": listed})


def cost_aware(room: Room) -> st.SearchStrategy[Options]:
    seconds = st.floats(1e-6, 1.0)
    every = {f"d{i}": seconds for i in range(room.n_drafters)}
    given = {"kind": st.just("cost_aware"), "costs": st.fixed_dictionaries(every)}
    return st.fixed_dictionaries(
        given | {"target_cost": seconds, "trials": st.integers(1, 4)},
        optional={"node_cost": st.floats(0, 0.1), "retry_after": st.integers(1, 9)},
    )


def online(room: Room) -> st.SearchStrategy[Options]:
    seconds = st.floats(1e-6, 1.0)
    every = {f"d{i}": seconds for i in range(room.n_drafters)}
    given = {"kind": st.just("online"), "costs": st.fixed_dictionaries(every)}
    return st.fixed_dictionaries(
        given | {"target_cost": seconds, "seed": st.integers(0, 9)},
        optional={
            "node_cost": st.floats(0, 0.1),
            "learning_rate": st.floats(0.1, 20.0),
            "share": st.floats(0.0, 0.5),
            "refresh": st.integers(1, 9),
        },
    )


SHAPE = {
    "depth": st.sampled_from([3, 5, 6, 4, 2, 1, 0]),
    "width": st.one_of(st.integers(2, 5), st.integers(1, 12)),
    "budget": st.one_of(st.integers(4, 24), st.integers(0, 8)),
}

_COSTS = st.fixed_dictionaries(
    {"target": st.floats(1e-6, 1.0)},
    optional={"node": st.floats(0, 0.3), "drafting": st.floats(0, 1.0)},
)
AUTO = {
    "budget": st.just("auto"),
    "budget_limit": st.one_of(st.integers(4, 24), st.integers(0, 8)),
    # Given: with measured ones no two runs verify alike.
    "budget_costs": _COSTS,
}


def shaped(kind: str) -> st.SearchStrategy[Options]:
    """A builder with a budget, one time in four of each step's own."""
    auto = st.fixed_dictionaries(
        {"kind": st.just(kind), **AUTO}, optional={n: SHAPE[n] for n in ("depth", "width")}
    )
    return st.sampled_from([False, False, False, True]).flatmap(
        lambda goes_by_costs: auto if goes_by_costs else options(kind, **SHAPE)
    )


STATIC_SHAPES = (
    [[0]],
    [[0], [0, 0], [0, 0, 0]],
    [[0], [1], [0, 0]],
    [[0], [1], [2], [0, 0], [1, 0], [1, 2], [0, 0, 0]],
)

PARTS: dict[str, dict[str, Callable[[Room], st.SearchStrategy[Options]]]] = {
    "drafter": {
        "ngram": ngram,
        "suffix": suffix,
        "recycle": lambda room: options(
            "recycle", k=st.integers(1, 9), levels=st.integers(1, 4), keep=st.booleans()
        ),
        "datastore": datastore,
        "lm": lm,
        "head": head,
        "adversarial_drafters:AlwaysRight": lambda room: oracle(room, "AlwaysRight"),
        "adversarial_drafters:AlwaysWrong": lambda room: oracle(room, "AlwaysWrong"),
        "adversarial_drafters:Scripted": lambda room: script(room, "Scripted"),
        "adversarial_drafters:ScriptedScorer": lambda room: script(room, "ScriptedScorer"),
    },
    "builder": {
        "layered": lambda room: shaped("layered"),
        "best_first": lambda room: shaped("best_first"),
        "chain": lambda room: options("chain", depth=st.integers(0, 6)),
        "static": lambda room: st.sampled_from(STATIC_SHAPES).map(
            lambda paths: {"kind": "static", "paths": paths}
        ),
        "whimsical_parts:WhimsicalBuilder": lambda room: own(
            "whimsical_parts:WhimsicalBuilder", seed=SEEDS, **SHAPE
        ),
    },
    "graft": {
        "treegraft": lambda room: (
            options(
                "treegraft",
                lookback=st.integers(0, 6),
                revisit=st.booleans(),
                rescore=st.sampled_from(["every_visit", "once", "never"]),
                recover=st.booleans(),
                reach=st.sampled_from(["frontier", "any"]),
            )
            | options(
                "treegraft",
                reselect=st.just(False),
                rescore=st.sampled_from(["every_visit", "once", "never"]),
            )
        ),
        "union": lambda room: options("union"),
        "replace": lambda room: options("replace"),
        "budget_swap": lambda room: options("budget_swap", swap=st.integers(1, 9)),
        "whimsical_parts:WhimsicalGraft": lambda room: own(
            "whimsical_parts:WhimsicalGraft", seed=SEEDS
        ),
    },
    "scheduler": {
        "never": lambda room: options("never"),
        "always": lambda room: options("always"),
        "fixed": fixed,
        # Without calls it goes by measured times, and no two runs draft alike.
        "budgeted": lambda room: st.fixed_dictionaries(
            {"kind": st.just("budgeted"), "calls": st.integers(0, 9)}
        ),
        "cost_aware": cost_aware,
        "online": online,
        "priority": lambda room: options("priority", hand_over=st.booleans()),
        "whimsical_parts:WhimsicalScheduler": lambda room: own(
            "whimsical_parts:WhimsicalScheduler", seed=SEEDS
        ),
    },
    "verifier": {
        "walk": lambda room: options("walk"),
        "ledger": lambda room: options("ledger"),
        "traversal": lambda room: options("traversal"),
    },
}


def part(role: str, room: Room) -> st.SearchStrategy[Options]:
    """Any kind of a role, a built-in one about twice as often as one by import path."""
    kinds = [kind for kind in PARTS[role] for _ in range(1 if ":" in kind else 2)]
    return st.one_of([PARTS[role][kind](room) for kind in kinds])


# --- sampling and stops ---------------------------------------------------------------------------

TEMPERATURES = st.one_of(
    st.just(0.0), st.sampled_from([5e-324, 1e-30, 1e-4, 100.0]), st.floats(0.5, 2.0)
)
SAMPLING = st.fixed_dictionaries(
    {"temperature": TEMPERATURES},
    optional={
        "seed": SEEDS,
        "top_k": st.one_of(st.none(), st.integers(1, 12)),
        "top_p": st.one_of(st.none(), st.floats(0.0, 1.0, exclude_min=True)),
        "min_p": st.one_of(st.none(), st.floats(0.0, 1.0)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.5, 3.0), st.just(100.0)),
    },
)


@st.composite
def stops(draw: st.DrawFn, room: Room) -> Options:
    most = draw(st.sampled_from([24, 40, 30, 17, 8, 5, 3, 2, 1]))
    ids = st.integers(0, room.vocab - 1)
    # Most texts go on for a while: an end at a random token comes soon.
    kind = draw(st.sampled_from(["one", "null", "none", "several", "null"]))
    several = st.lists(ids, unique=True, max_size=room.vocab)
    listed = {"null": st.none(), "none": st.just([]), "one": ids.map(lambda i: [i])}
    eos = draw(listed.get(kind, several))
    # Where every token ends the text, none can be left for a while.
    all_end = len(eos or ()) == room.vocab
    n_strings = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return {
        "max_new_tokens": most,
        "min_new_tokens": 0 if all_end else draw(st.sampled_from([most, 0, most // 2])),
        "eos": eos,
        "strings": draw(st.lists(st.sampled_from(STRINGS), min_size=n_strings, max_size=n_strings)),
    }


@st.composite
def prompts(draw: st.DrawFn, room: Room) -> list[int]:
    """Mostly short; else up to, at and past the limit of the target or of a drafter."""
    networks = [*room.models.values(), *room.heads.values()]
    limits = {network.max_positions for network in networks} - {None}
    lengths = [st.integers(1, 8), st.integers(1, 8), st.integers(1, 40)]
    lengths += [st.integers(max(1, limit - 9), limit + 2) for limit in sorted(limits)]
    length = draw(st.one_of(lengths))
    # A short text over and over, so that look-ups find something.
    ids, n_start = st.integers(0, room.vocab - 1), min(length, draw(st.sampled_from([3, 9, 5, 1])))
    start = draw(st.lists(ids, min_size=n_start, max_size=n_start))
    return (start * length)[:length]


# --- models ---------------------------------------------------------------------------------------


@st.composite
def table_rooms(draw: st.DrawFn) -> Room:
    """A target that is a table, and drafters that agree with it in everything, mostly or never."""
    vocab = draw(st.integers(1, len(PIECES)))
    seed, order = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 7]))
    target = hashed_model(vocab, seed, order, draw(st.sampled_from([0.5, 3.0, 9.0])))
    form = draw(st.sampled_from(["hashed", "hashed", "tied", "holed", "looping"]))
    if form == "tied":
        target = tied_model(target)
    elif form == "holed":
        target = holed_model(target)
    elif form == "looping":
        loop = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6))
        target = looping_model(loop, vocab)
    other = hashed_model(vocab, draw(st.integers(10, 20)))
    near = mixed_model(target, other, draw(st.sampled_from([0.1, 0.3, 0.5])))
    short = replace(near, name="short", max_positions=draw(st.integers(1, 24)))
    brief = replace(target, name="brief", max_positions=draw(st.integers(1, 24)))
    target.max_positions = draw(st.one_of(st.none(), st.none(), st.integers(2, 48)))
    models = {"target": target, "near": near, "far": other, "short": short, "brief": brief}
    heads = {
        "right head": TableHead(replace(target, max_positions=None)),
        "near head": TableHead(near),
        "short head": TableHead(near, max_positions=draw(st.integers(1, 24))),
    }
    key = (seed, order) if form == "hashed" else None
    return Room(vocab, models, target.logits, key, heads)


HF_TARGETS = ("llama", "gpt2", "gemma3")
"""Rotary embeddings, learned positions that end at the limit, and windows."""
HF_LIMIT = 40


@cache
def hf_room(family: str) -> Room:
    """The tiny float64 model of a family, with a near copy, another family and a short context."""
    from backends.families import build

    from treegraft.backends.head import HeadBlock, HFDraftHead
    from treegraft.backends.hf import HFLanguageModel

    def made(name: str, seed: int, limit: int = HF_LIMIT) -> Any:
        tokens = {"vocab_size": len(PIECES), "bos_token_id": None, "eos_token_id": None}
        return build(name, seed, torch.float64, max_position_embeddings=limit, **tokens)

    target, near = made(family, 0), made(family, 0)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in near.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += 0.03 * noise * weight.std()
    other = HF_TARGETS[HF_TARGETS.index(family) - 1]
    models = {
        "target": HFLanguageModel(target, name="target"),
        "near": HFLanguageModel(near, name="near", self_test=False),
        "far": HFLanguageModel(made(other, 3), name="far", self_test=False),
        "short": HFLanguageModel(made("gpt2", 4, limit=20), name="short", self_test=False),
    }

    @lru_cache(maxsize=4096)
    def after(text: tuple[int, ...]) -> Tensor:
        # The model alone: one full causal forward, without our cache or masks.
        with torch.no_grad():
            return target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        block = HeadBlock(
            target.get_input_embeddings().weight.shape[1],
            {
                "hidden_size": target.config.hidden_size,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 30,
            },
        )
    heads = {"random head": HFDraftHead(block, models["target"], "random head")}
    return Room(len(PIECES), models, lambda text: after(tuple(text)), heads=heads)


HF_ROOMS = st.sampled_from(HF_TARGETS).map(hf_room)


# --- the whole ------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, rooms: st.SearchStrategy[Room]) -> Case:
    """A pipeline of any parts with any settings, and a prompt for it."""
    room = draw(rooms)
    builder = draw(part("builder", room))
    shape = {"depth": 5, "width": 10} | builder.get("params", builder)
    if "paths" in shape:
        shape["depth"] = max(map(len, shape["paths"]))
        shape["width"] = 1 + max(max(path) for path in shape["paths"])
    if builder["kind"] == "chain":
        shape["width"] = 1
    room = replace(room, depth=shape["depth"], width=shape["width"])
    room = replace(room, n_drafters=draw(st.sampled_from([2, 1, 3, 4, 0])))
    drafters = [draw(part("drafter", room)) for _ in range(room.n_drafters)]
    roles = {role: draw(part(role, room)) for role in ("graft", "scheduler", "verifier")}
    online = {"kind": "online", "scope": "text", "strength": 0.5}
    none = {"kind": "none"}
    reckons = roles["scheduler"]["kind"] == "cost_aware" or builder.get("budget") == "auto"
    config = {
        "target": {"model": "target"},
        "drafters": [{**drafter, "name": f"d{i}"} for i, drafter in enumerate(drafters)],
        "builder": builder,
        **roles,
        # Kept from text to text it would draft the second run otherwise than the first.
        "calibration": online if reckons else draw(st.sampled_from([none, online])),
        "leftover": draw(st.booleans()),
        "sampling": draw(SAMPLING),
        "stop": draw(stops(room)),
        "backend": {"kind": draw(st.sampled_from(["tensor", "tensor", "reference"]))},
    }
    if roles["verifier"]["kind"] == "walk" and draw(st.sampled_from([False, False, False, True])):
        config["fallback"] = "auto"
    if builder["kind"] == "static":  # its paths are expanded by grafts that do not go elsewhere
        config["graft"] = {"kind": "union"}
    look_ups = {"ngram", "suffix", "recycle", "datastore"}
    names = [d["name"] for d in config["drafters"] if d["kind"] in look_ups]
    if names and config["graft"]["kind"] != "replace":
        config["ride_along"] = draw(st.lists(st.sampled_from(names), unique=True))
    return Case(config, room, draw(prompts(room)))


def plain_end(case: Case) -> tuple[list[int], str]:
    """Tokens and finish reason of decoding without any of our parts, stop strings searched after.

    The oracle: ``plain_tokens`` asks the target about whole texts, one token at a time.
    """
    stop = case.config["stop"]
    eos, most = tuple(stop["eos"] or ()), stop["max_new_tokens"]
    room = most if case.room.limit is None else min(most, case.room.limit - len(case.prompt))
    sampling = Sampling(**case.config["sampling"], min_new_tokens=stop["min_new_tokens"], eos=eos)
    tokens = plain_tokens(case.room.after, case.prompt, room, sampling)
    decode = PieceTokenizer(PIECES).decode
    for k in range(1, len(tokens) + 1):
        if tokens[k - 1] in eos:
            return tokens[:k], "eos"
        if any(string in decode(tokens[:k]) for string in stop["strings"]):
            return tokens[:k], "stop_string"
    return tokens, "length" if len(tokens) == most else "context_limit"
