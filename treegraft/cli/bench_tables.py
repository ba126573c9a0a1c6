"""Results of ``treegraft bench`` as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from treegraft.cli.tables import new_table, text_row

if TYPE_CHECKING:
    from treegraft.bench.peer_report import Peers
    from treegraft.bench.profile import Profile

__all__ = ["peers_remarks", "peers_report", "profile_report"]


def peers_report(peers: Peers) -> Group:
    """Every arm in the order of the line-up, and the headline ratios."""
    from treegraft.bench.peer_report import BASELINE

    s = peers.settings
    how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
    what = (
        f"{s.target}: {how}, {peers.n_rounds} prompts of at most {s.max_new_tokens} new tokens, "
        f"{s.dtype}, {peers.threads} threads"
    )
    columns = ("arm", "tokens/s", "x plain", "median", "10-90 %", "tokens", "warm-up s", "settings")
    table = new_table("Speed (tokens per second of the whole call, prefill included)", *columns)
    table.columns[-1].justify = "left"
    for arm in peers.arms:
        ratio = peers.ratio(arm.name, BASELINE)
        if ratio is None:
            continue
        n = peers.n_different(arm.name)
        options = peers.chosen[arm.name]
        text_row(
            table,
            arm.name,
            f"{peers.total_speed(arm.name):.1f}",
            f"{ratio.total:.2f}",
            f"{ratio.median:.2f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            "not compared" if n is None else "identical" if n == 0 else f"DIFFER in {n}",
            f"{peers.warm_up_seconds.get(arm.name, 0.0):.1f}",
            "" if "config" in options else ", ".join(f"{k}={v}" for k, v in options.items()),
        )
    parts: list[Table | Text] = [Text(what), Text(""), table, Text(""), _headline(peers)]
    return Group(*parts)


def _headline(peers: Peers) -> Table:
    best = {"ours/hf_best": peers.best("hf"), "ours/peers_best": peers.best("peers")}
    columns = ("ratio", "median", "10-90 %", "total", "by CPU time", "best is")
    table = new_table("Ratios round by round", *columns)
    table.columns[-1].justify = "left"
    for name, ratio in peers.ratios.items():
        if ratio is None:
            text_row(table, name, "none", "", "", "", "did not run")
            continue
        spread = f"{ratio.low:.2f}-{ratio.high:.2f}"
        worked = peers.cpu_ratios[name]
        by_cpu = "" if worked is None else f"{worked.median:.2f}"
        cells = (f"{ratio.median:.2f}", spread, f"{ratio.total:.2f}", by_cpu, best.get(name) or "")
        text_row(table, name, *cells)
    return table


def peers_remarks(peers: Peers) -> list[str]:
    """What the tables do not say: the physical limit, who is missing, failed or incomparable."""
    lines = []
    share = peers.physical_limit_share
    if share is not None:
        lines.append(f"ours spends {share:.0%} of its steps in forwards (share of physical limit)")
    incomparable = [arm for arm in peers.finished if peers.n_different(arm) is None]
    if incomparable:
        lines.append(
            "tokens of sampled texts are not compared where the noise is not ours or the tree is "
            f"drawn: {', '.join(incomparable)}"
        )
    lines += [f"{family}: {reason}" for family, reason in peers.absent.items()]
    lines += [f"{arm} could not run: {error}" for arm, error in peers.failed.items()]
    return lines


def profile_report(profile: Profile) -> Group:
    """Seconds per step by stage, forwards by model, and the share of the physical limit."""
    figures = profile.as_dict()
    step = figures["seconds_per_step"]
    stages = new_table("Milliseconds of a step by stage", "stage", "ms", "share")
    for stage, seconds in figures["stages"].items():
        text_row(stages, stage, f"{1e3 * seconds:.3f}", f"{seconds / step:.1%}")
    text_row(stages, "step", f"{1e3 * step:.3f}", "100.0%")
    forwards = new_table(
        "Forwards of a step", "model", "forwards", "tokens each", "as timed, ms", "bare, ms"
    )
    for name, entry in figures["forwards"].items():
        text_row(
            forwards,
            name,
            f"{entry['per_step']:.2f}",
            f"{entry['tokens_per_forward']:.1f}",
            f"{1e3 * entry['stage_seconds_per_step']:.3f}",
            f"{1e3 * entry['bare_seconds_per_step']:.3f}",
        )
    spread = figures["share_of_steps"]
    counts = f"{figures['steps']} steps, {figures['new_tokens']} new tokens"
    line = (
        f"share of the physical limit: {figures['physical_limit_share']:.1%} (steps: median "
        f"{spread['median']:.1%}, 10-90 % {spread['low']:.1%}-{spread['high']:.1%}); "
        f"{counts}, {figures['threads']} threads"
    )
    return Group(stages, Text(""), forwards, Text(""), Text(line))
