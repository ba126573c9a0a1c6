"""Is drafting lossless with this model here? Every drafted token against plain decoding's choice.

A prompt is decoded with drafting, then plain decoding goes through the drafted text: at each place,
given the drafted tokens before it, its choice must be the drafted token. In float32 and float64
every difference is a fault. In narrower types it is a tie where rounding alone may decide
(choice.py says when); the two texts part there, so plain decoding goes on behind the drafted token,
and the rest of the text is checked like everything before. A fault ends a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch

from treegraft import __version__
from treegraft.backends.adapter import AdapterReport
from treegraft.bench.choice import (
    Choice,
    adapter_report,
    arithmetic_type,
    choice_between,
    is_exact,
    rounding_units,
)
from treegraft.bench.prompts import default_prompts
from treegraft.config import PipelineConfig
from treegraft.core.errors import ConfigError, PromptError
from treegraft.core.language_model import LanguageModel
from treegraft.core.sampling import Sampling
from treegraft.core.tree import ROOT, TokenTree
from treegraft.loading import Loader
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmConfig
from treegraft.prompts import Prompt

__all__ = [
    "LAYOUT_VERSION",
    "Check",
    "Deviation",
    "Origin",
    "TextVerdict",
    "check_lossless",
]

LAYOUT_VERSION = 1
"""Of ``Check.as_dict``, as docs/check.md states it; it grows when a key goes or changes meaning."""

Mode = Literal["greedy", "seeded"]

_PLAIN = ("drafters", "builder", "graft", "scheduler", "verifier")
"""What plain decoding has at its default: nobody drafts, and the built-in walk verifies."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a committed token came from.

    Attributes
    ----------
    step : number of the target call that committed it, from 0.
    node : its node in the tree that the target read; None for the bonus token, which has none.
    parent : the node above it (0 is the root); for the bonus token the last node accepted.
    depth : edges from the root to ``node``, or to where it would be.
    drafter : who proposed the node; None for the bonus token.
    """

    step: int
    node: int | None
    parent: int
    depth: int
    drafter: str | None


@dataclass(frozen=True, slots=True)
class Deviation:
    """One place where the drafted token is not plain decoding's choice: a tie or a fault.

    Attributes
    ----------
    position : index in the text, prompt included. new : index among the new tokens.
    choice : plain decoding's token, the drafted one, and what the target makes of the two.
    origin : of the drafted token; None where the drafted text had ended.
    """

    position: int
    new: int
    choice: Choice
    origin: Origin | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        origin = None if self.origin is None else asdict(self.origin)
        return {
            "position": self.position,
            "new": self.new,
            **self.choice.as_dict(),
            "origin": origin,
        }


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """One prompt in one mode.

    Attributes
    ----------
    prompt : its id. mode : ``greedy`` or ``seeded``.
    n_prompt : tokens of the prompt.
    n_tokens : tokens of the drafted text that were checked; none after a fault.
    n_accepted : how many of these were nodes of a draft tree; the others are bonus tokens.
    ties : every tie, in order. fault : the first fault, or None.
    notices : what the pipeline switched off while it drafted, and why.
    """

    prompt: str
    mode: Mode
    n_prompt: int
    n_tokens: int
    n_accepted: int
    ties: tuple[Deviation, ...] = ()
    fault: Deviation | None = None
    notices: tuple[str, ...] = ()

    @property
    def verdict(self) -> Literal["equal", "tie", "fault"]:
        """``fault`` if there is one, else ``tie`` if there is any."""
        if self.fault is not None:
            return "fault"
        return "tie" if self.ties else "equal"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "prompt": self.prompt,
            "mode": self.mode,
            "verdict": self.verdict,
            "prompt_tokens": self.n_prompt,
            "tokens": self.n_tokens,
            "accepted": self.n_accepted,
            "ties": [tie.as_dict() for tie in self.ties],
            "fault": None if self.fault is None else self.fault.as_dict(),
            "notices": list(self.notices),
        }


@dataclass(frozen=True, slots=True)
class Check:
    """The whole check.

    Attributes
    ----------
    config : what drafted. dtype : the type that the target's sums round like.
    rounding_units : gap that is excused, in units of eps * magnitude (choice.py); 0 if none is.
    n_tokens : new tokens asked for per text. temperature : of the seeded mode.
    report, drafter_reports : what the adapter decided; None or left out for models of one's own.
    verdicts : one per prompt and mode. skipped : modes that were left out, and why.
    """

    config: PipelineConfig
    dtype: str
    rounding_units: float
    n_tokens: int
    temperature: float
    report: AdapterReport | None
    drafter_reports: dict[str, AdapterReport]
    verdicts: tuple[TextVerdict, ...]
    skipped: dict[str, str]

    @property
    def passed(self) -> bool:
        """True if nothing was a fault."""
        return self.count("fault") == 0

    @property
    def n_checked(self) -> int:
        """Tokens that were checked, over all texts."""
        return sum(verdict.n_tokens for verdict in self.verdicts)

    @property
    def n_accepted(self) -> int:
        """How many of these were nodes of a draft tree."""
        return sum(verdict.n_accepted for verdict in self.verdicts)

    @property
    def n_ties(self) -> int:
        """Places that were ties, over all texts."""
        return sum(len(verdict.ties) for verdict in self.verdicts)

    def count(self, verdict: str) -> int:
        """How many prompts and modes got this verdict."""
        return sum(v.verdict == verdict for v in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """The report that ``treegraft check --json`` prints; docs/check.md states its layout."""
        return {
            "report": "treegraft check",
            "layout": LAYOUT_VERSION,
            "versions": {
                "treegraft": __version__,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
            "target": self.config.target.model,
            "drafters": list(self.config.drafter_names),
            "dtype": self.dtype,
            "exact": self.rounding_units == 0.0,
            "rounding_units": self.rounding_units,
            "tokens_per_text": self.n_tokens,
            "seed": self.config.sampling.seed,
            "temperature": self.temperature,
            "passed": self.passed,
            "counts": {
                "texts": len(self.verdicts),
                "equal": self.count("equal"),
                "tie": self.count("tie"),
                "fault": self.count("fault"),
                "tokens": self.n_checked,
                "accepted": self.n_accepted,
                "ties": self.n_ties,
            },
            "texts": [v.as_dict() for v in self.verdicts],
            "skipped": self.skipped,
            "adapter": None if self.report is None else _plain(self.report),
            "drafter_adapters": {n: _plain(r) for n, r in self.drafter_reports.items()},
            "config": self.config.model_dump(mode="json"),
        }


def _plain(report: AdapterReport) -> dict[str, Any]:
    return asdict(report) | {"dtype": str(report.dtype).removeprefix("torch.")}


def check_lossless(
    config: PipelineConfig,
    prompts: Sequence[Prompt] | None = None,
    n_tokens: int = 64,
    on_verdict: Callable[[TextVerdict], None] | None = None,
    models: Mapping[str, LanguageModel] | None = None,
) -> Check:
    """Decode with ``config`` and judge every drafted token by its target alone.

    Each prompt is decoded greedily and seeded, at the config's temperature or 1 if that is 0;
    everything else about sampling is the config's. End tokens and stop strings are not obeyed, so
    that ``n_tokens`` are checked wherever the context has room for them.

    Parameters
    ----------
    prompts : default ``default_prompts``. n_tokens : new tokens of each text.
    on_verdict : called after each prompt and mode, for progress.
    models : models that are already loaded, as for ``build_pipeline``.

    Raises
    ------
    ConfigError, UnsupportedModelError : nobody drafts, nothing is to be decoded, or as
        ``build_pipeline`` does.
    PromptError : names the first prompt that cannot be read, before anything is decoded.
    """
    if not config.drafters:
        raise ConfigError("drafters: at least one is needed to check drafting, found none")
    if n_tokens < 1:
        raise ConfigError(f"a check needs at least one token per text, found {n_tokens}")
    if prompts is not None and not prompts:
        raise PromptError("a check needs at least one prompt, found none")
    stop = {"max_new_tokens": n_tokens, "min_new_tokens": 0, "eos": (), "strings": ()}
    config = config.model_copy(update={"stop": config.stop.model_copy(update=stop)})
    fields = {name: PipelineConfig.model_fields[name].default for name in _PLAIN}
    loader = Loader(config.backend, dict(models or {}))
    plain = build_pipeline(config.model_copy(update=fields), loader=loader)
    drafted = build_pipeline(config, loader=loader)
    if prompts is None:
        prompts = default_prompts(plain, n_tokens)
    starts = [_encode(plain, prompt) for prompt in prompts]
    temperature = config.sampling.temperature or 1.0
    modes: dict[Mode, float] = {"greedy": 0.0, "seeded": temperature}
    heated = config.sampling.model_copy(update={"temperature": temperature})
    skipped = {}
    if not config.model_copy(update={"sampling": heated}).same_tokens:
        del modes["seeded"]
        skipped["seeded"] = (
            f"verifier {config.verifier.kind!r} keeps the law of sampled texts and not their "
            "tokens, so there are none to compare"
        )
    for heat in modes.values():
        _refuse_state(plain.sampling(starts[0], temperature=heat))
    verdicts: list[TextVerdict] = []
    for prompt, start in zip(prompts, starts, strict=True):
        for mode, heat in modes.items():
            verdicts.append(_judge(plain, drafted, prompt.id, start, n_tokens, mode, heat))
            if on_verdict is not None:
                on_verdict(verdicts[-1])
    reports: dict[str, AdapterReport] = {}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            report = adapter_report(loader.model(drafter.model))
            reports |= {} if report is None else {name: report}
    dtype = arithmetic_type(plain.target)
    return Check(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        rounding_units=0.0 if is_exact(dtype) else rounding_units(plain.target),
        n_tokens=n_tokens,
        temperature=temperature,
        report=adapter_report(plain.target),
        drafter_reports=reports,
        verdicts=tuple(verdicts),
        skipped=skipped,
    )


def _refuse_state(sampling: Sampling) -> None:
    """ConfigError for a logits processor whose answer at a place cannot be asked for again."""
    if sampling.processors is not None and sampling.processors.stateful:
        raise ConfigError(
            f"logits processor {sampling.processors.stateful[0].name!r} may keep state from call "
            "to call, so a check cannot ask it about single places"
        )


def _encode(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    try:
        return pipeline.encode(prompt.content)
    except PromptError as error:
        raise PromptError(f"prompt {prompt.id!r}: {error}") from None


def _judge(
    plain: Pipeline,
    drafted: Pipeline,
    prompt: str,
    start: Sequence[int],
    n_tokens: int,
    mode: Mode,
    temperature: float,
) -> TextVerdict:
    """Decode one text and go through it. Both pipelines share target, sampling and stop rules."""
    found, origins, notices = _drafted(drafted, start, temperature)
    sampling = plain.sampling(start, temperature=temperature)
    n_expected = n_tokens
    if plain.target.max_positions is not None:
        n_expected = min(n_tokens, plain.target.max_positions - len(start))
    end = max(n_expected, len(found))
    ties: list[Deviation] = []
    place, fault = 0, None
    while place < end and fault is None:
        # As far as plain decoding agrees, one run of it is enough.
        run = _choices(plain, [*start, *found[:place]], n_expected - place, temperature)
        token, expected = None, None
        while place < end and token == expected:
            expected = next(run)
            token = found[place] if place < len(found) else None
            place += 1
        if token == expected:
            break
        new = place - 1
        text = [*start, *found[:new]]
        choice = choice_between(plain.target, text, len(start), expected, token, sampling)
        deviation = Deviation(len(text), new, choice, None if token is None else origins[new])
        if choice.is_tie:
            ties.append(deviation)
        else:
            fault = deviation
    checked = origins[:place]
    n_accepted = sum(origin.node is not None for origin in checked)
    return TextVerdict(
        prompt, mode, len(start), len(checked), n_accepted, tuple(ties), fault, notices
    )


def _drafted(
    pipeline: Pipeline, start: Sequence[int], temperature: float
) -> tuple[list[int], list[Origin], tuple[str, ...]]:
    """The drafted tokens, where each came from, and the notices of the run."""
    tokens: list[int] = []
    origins: list[Origin] = []
    notices: tuple[str, ...] = ()
    for step, chunk in enumerate(pipeline.stream(start, temperature=temperature)):
        tokens += chunk.tokens
        for i in range(len(chunk.tokens)):
            origins.append(_origin(step, chunk.tree, chunk.path, i, pipeline.drafter_names))
        if chunk.generation is not None:
            notices = chunk.generation.notices
    return tokens, origins, notices


def _origin(
    step: int, tree: TokenTree, path: Sequence[int], i: int, names: Sequence[str]
) -> Origin:
    parent = path[i - 1] if i else ROOT
    if i >= len(path):
        return Origin(step, None, parent, i + 1, None)
    source = int(tree.source[path[i]])
    # A builder of one's own may write what it likes there.
    name = names[source] if 0 <= source < len(names) else None
    return Origin(step, path[i], parent, i + 1, name)


def _choices(
    plain: Pipeline, text: Sequence[int], n_tokens: int, temperature: float
) -> Iterator[int | None]:
    """Plain decoding's tokens after ``text``, then None: it has nothing to say there."""
    if n_tokens > 0:
        for chunk in plain.stream(text, temperature=temperature, max_new_tokens=n_tokens):
            yield from chunk.tokens
    while True:
        yield None
