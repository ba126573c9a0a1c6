"""Is drafting lossless with this model here? Drafted against plain decoding, token by token.

In float32 and float64 every difference is a fault. Narrower types round the same sum differently
when a forward is wider, so a difference where the target itself hardly decides is a tie: the logits
of both tokens lie within rounding of the largest. The logits are computed anew for that verdict, by
a causal forward of the common prefix without any tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from treegraft.backends.adapter import AdapterReport
from treegraft.bench.comparison import first_difference
from treegraft.config import PipelineConfig
from treegraft.core.language_model import LanguageModel, extend
from treegraft.core.sampling import History, Noise, Sampling, process
from treegraft.loading import Loader
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmConfig
from treegraft.prompts import Prompt

__all__ = [
    "Check",
    "Choice",
    "TextVerdict",
    "arithmetic_type",
    "check_lossless",
    "choice_between",
    "default_prompts",
    "is_exact",
]

TIE_UNITS = 2.0
"""A gap of up to so many units in the last place of the larger logit is rounding."""

_EXACT = (torch.float32, torch.float64)
_TEXTS = (
    "def parse_args(argv):\n    parser = argparse.ArgumentParser()\n",
    "The committee met on Tuesday to discuss the plans for the new library.",
    "name,age,city\nAnna,31,Bonn\nBert,27,Kiel\nCarla,45,",
    "for i in range(10):\n    total += i\nfor j in range(10):\n    total +=",
)
_LENGTHS = (1, 2, 12, 48)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target makes of two tokens at one place.

    Values are what it compares: logits after the sampling settings, with the noise of the seed if
    sampled; minus infinity where the settings exclude a token, or where there is none.

    Attributes
    ----------
    first : its own first choice. best : the value of that.
    expected, found : the values of the two tokens.
    tie_within : largest gap that rounding explains; 0 in exact arithmetic.
    """

    first: int
    best: float
    expected: float
    found: float
    tie_within: float

    @property
    def gap(self) -> float:
        """How far the worse of the two tokens lies below the first choice."""
        return self.best - min(self.expected, self.found)

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone may decide between the two tokens."""
        return self.tie_within > 0.0 and self.gap <= self.tie_within

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the gap; None for what is infinite, which JSON cannot hold."""
        data = asdict(self) | {"gap": self.gap}
        return {key: value if math.isfinite(value) else None for key, value in data.items()}


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """One prompt in one mode.

    Attributes
    ----------
    prompt : its id. mode : ``greedy`` or ``seeded``.
    verdict : ``equal``, ``tie`` or ``fault``.
    n_tokens : tokens compared; none after the first difference, where the texts part.
    position, expected, found : first difference, as in ``comparison.Difference``.
    choice : what the target makes of the two tokens there, computed anew.
    """

    prompt: str
    mode: Literal["greedy", "seeded"]
    verdict: Literal["equal", "tie", "fault"]
    n_tokens: int
    position: int | None = None
    expected: int | None = None
    found: int | None = None
    choice: Choice | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the gap."""
        return asdict(self) | {"choice": None if self.choice is None else self.choice.as_dict()}


@dataclass(frozen=True, slots=True)
class Check:
    """The whole check: what the adapter decided (None for a model of one's own) and verdicts."""

    target: str
    drafters: tuple[str, ...]
    report: AdapterReport | None
    drafter_reports: dict[str, AdapterReport]
    verdicts: tuple[TextVerdict, ...]

    @property
    def passed(self) -> bool:
        """True if nothing was a fault."""
        return all(verdict.verdict != "fault" for verdict in self.verdicts)

    def count(self, verdict: str) -> int:
        """How many prompts and modes got this verdict."""
        return sum(v.verdict == verdict for v in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "target": self.target,
            "drafters": list(self.drafters),
            "passed": self.passed,
            "equal": self.count("equal"),
            "ties": self.count("tie"),
            "faults": self.count("fault"),
            "tokens": sum(v.n_tokens for v in self.verdicts),
            "adapter": None if self.report is None else _plain(self.report),
            "drafter_adapters": {n: _plain(r) for n, r in self.drafter_reports.items()},
            "verdicts": [v.as_dict() for v in self.verdicts],
        }


def _plain(report: AdapterReport) -> dict[str, Any]:
    return asdict(report) | {"dtype": str(report.dtype).removeprefix("torch.")}


def check_lossless(
    config: PipelineConfig,
    prompts: Sequence[Prompt] | None = None,
    n_tokens: int = 64,
    seed: int = 0,
    on_verdict: Callable[[TextVerdict], None] | None = None,
    models: Mapping[str, LanguageModel] | None = None,
) -> Check:
    """Decode with ``config`` and with its target alone, and judge every prompt.

    Each prompt is decoded greedily and at temperature 1 with ``seed``; other sampling settings are
    those of the config. End tokens and stop strings are not obeyed, so that ``n_tokens`` are
    compared wherever the context has room for them.

    Parameters
    ----------
    prompts : default ``default_prompts``. n_tokens : new tokens of each text.
    on_verdict : called after each prompt and mode, for progress.
    models : models that are already loaded, as for ``build_pipeline``.
    """
    stop = {"max_new_tokens": n_tokens, "min_new_tokens": 0, "eos": (), "strings": ()}
    config = config.model_copy(update={"stop": config.stop.model_copy(update=stop)})
    alone = config.model_copy(update={"drafters": ()})
    # Plain decoding is verified by the built-in walk, whatever verifier is under test.
    fields = {name: PipelineConfig.model_fields[name].default for name in ("verifier", "scheduler")}
    loader = Loader(config.backend, dict(models or {}))
    plain = build_pipeline(alone.model_copy(update=fields), loader=loader)
    drafted = build_pipeline(config, loader=loader)
    if prompts is None:
        prompts = default_prompts(plain, n_tokens)
    verdicts: list[TextVerdict] = []
    modes: dict[Literal["greedy", "seeded"], float] = {"greedy": 0.0, "seeded": 1.0}
    for prompt in prompts:
        for mode, temperature in modes.items():
            settings = {"temperature": temperature, "seed": seed}
            expected = plain.generate(prompt.content, **settings).tokens
            found = drafted.generate(prompt.content, **settings).tokens
            sampling = plain.sampling(prompt.content, **settings)
            start = plain.encode(prompt.content)
            verdicts.append(_judge(plain.target, prompt.id, mode, start, expected, found, sampling))
            if on_verdict is not None:
                on_verdict(verdicts[-1])
    reports: dict[str, AdapterReport] = {}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            report = _report(loader.model(drafter.model))
            reports |= {} if report is None else {name: report}
    return Check(
        config.target.model,
        config.drafter_names,
        _report(plain.target),
        reports,
        tuple(verdicts),
    )


def _report(model: LanguageModel) -> AdapterReport | None:
    """What the adapter decided; a model of one's own need not have a report."""
    report = getattr(model, "report", None)
    return report if isinstance(report, AdapterReport) else None


def _judge(
    target: LanguageModel,
    prompt: str,
    mode: Literal["greedy", "seeded"],
    start: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    sampling: Sampling,
) -> TextVerdict:
    position = first_difference(expected, found)
    if position is None:
        return TextVerdict(prompt, mode, "equal", len(expected))
    here = expected[position] if position < len(expected) else None
    there = found[position] if position < len(found) else None
    choice = choice_between(target, start, expected[:position], (here, there), sampling)
    verdict: Literal["tie", "fault"] = "tie" if choice.is_tie else "fault"
    return TextVerdict(prompt, mode, verdict, position + 1, position, here, there, choice)


def choice_between(
    target: LanguageModel,
    prompt: Sequence[int],
    new: Sequence[int],
    tokens: tuple[int | None, int | None],
    sampling: Sampling,
) -> Choice:
    """What the target makes of two ``tokens`` after ``prompt`` and ``new``, by a causal forward.

    The first is the expected one, the second the one found; None where a text had ended.
    """
    text = [*prompt, *new]
    logits = torch.empty(0)
    with torch.no_grad():
        cache = target.new_cache(len(text))
        for _, rows in extend(target, cache, text, 0, last_only=True):
            logits = rows[-1]
    values = process(logits, sampling, History(list(text), len(prompt)))
    temperature = sampling.temperature
    if temperature != 0.0:
        values = values + Noise(sampling.seed, target.vocab_size).at(len(text)).to(values)
    first = int(values.argmax())
    dtype = arithmetic_type(target)
    within = 0.0
    if not is_exact(dtype):
        # Rounding acts on the raw logits; a temperature below 1 spreads it like everything else.
        places = [first, *(token for token in tokens if token is not None)]
        largest = float(logits[places].abs().max())
        within = TIE_UNITS * torch.finfo(dtype).eps * largest / (temperature or 1.0)
    expected, found = (-math.inf if token is None else float(values[token]) for token in tokens)
    return Choice(first, float(values[first]), expected, found, within)


def arithmetic_type(target: LanguageModel) -> torch.dtype:
    """The type that the target's sums round like; a model of one's own counts as exact.

    That of its weights, except where CUDA multiplies float32 as TF32: TF32 keeps as many bits of
    the mantissa as float16.
    """
    report = _report(target)
    if report is None:
        return torch.float64
    # The getter also takes in the older switches (allow_tf32, set_float32_matmul_precision) and
    # what is set for all of torch; "none" is torch's own default, which is float32 as it stands.
    precision = torch.backends.cuda.matmul.fp32_precision
    if report.dtype == torch.float32 and torch.device(target.device).type == "cuda":
        return torch.float32 if precision in ("none", "ieee") else torch.float16
    return report.dtype


def is_exact(dtype: torch.dtype) -> bool:
    """Whether a difference in arithmetic of this type is a fault and never a tie."""
    return dtype in _EXACT


def default_prompts(pipeline: Pipeline, n_tokens: int) -> list[Prompt]:
    """Prompts that this pipeline can read: the zoo's own for the zoo, else a few short ones.

    Without a tokenizer they are random ids of several lengths, each written twice so that
    look-ups find something; all leave room for ``n_tokens``.
    """
    if pipeline.tokenizer is not None:
        if pipeline.config.target.model.startswith("zoo:"):
            from treegraft.bench.demo import demo_prompts

            return demo_prompts(per_kind=1)
        return [Prompt(f"text {n}", text) for n, text in enumerate(_TEXTS, 1)]
    dice = torch.Generator().manual_seed(0)
    target = pipeline.target
    room = _LENGTHS[-1]
    if target.max_positions is not None:
        room = max(1, min(room, (target.max_positions - n_tokens) // 2))
    prompts = []
    for length in sorted({min(length, room) for length in _LENGTHS}):
        ids = torch.randint(0, target.vocab_size, (length,), generator=dice).tolist()
        prompts.append(Prompt(f"{2 * length} random ids", tuple(ids + ids)))
    return prompts
