"""Where the training text comes from, with the licence of each source, and how to fetch it.

Every source is what any user's machine can get: the standard library of the running Python, wheels
of the package index (downloaded, not installed) and Debian documentation packages (unpacked, not
installed).
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, slots=True)
class Source:
    """One origin of text. ``share_mb`` caps its text, in millions of characters, so that none
    dominates.
    """

    name: str
    origin: Literal["stdlib", "wheel", "debian"]
    licence: str
    share_mb: float
    roots: tuple[str, ...] = ("",)


def _wheel(name: str, licence: str, share_mb: float) -> Source:
    return Source(name, "wheel", licence, share_mb)


SOURCES: tuple[Source, ...] = (
    Source("stdlib", "stdlib", "PSF-2.0", 12.0),
    _wheel("torch", "BSD-3-Clause", 9.0),
    _wheel("transformers", "Apache-2.0", 6.0),
    _wheel("sympy", "BSD-3-Clause", 6.0),
    _wheel("pandas", "BSD-3-Clause", 6.0),
    _wheel("scipy", "BSD-3-Clause", 5.0),
    _wheel("scikit-learn", "BSD-3-Clause", 5.0),
    _wheel("statsmodels", "BSD-3-Clause", 3.0),
    _wheel("sqlalchemy", "MIT", 4.0),
    _wheel("matplotlib", "Matplotlib (PSF-style)", 4.0),
    _wheel("django", "BSD-3-Clause", 4.0),
    _wheel("numpy", "BSD-3-Clause", 4.0),
    _wheel("networkx", "BSD-3-Clause", 3.0),
    _wheel("mypy", "MIT", 3.0),
    _wheel("sphinx", "BSD-2-Clause", 2.0),
    _wheel("pydantic", "MIT", 2.0),
    _wheel("celery", "BSD-3-Clause", 2.0),
    _wheel("aiohttp", "Apache-2.0", 2.0),
    _wheel("pytest", "MIT", 2.0),
    _wheel("tornado", "Apache-2.0", 2.0),
    _wheel("pillow", "MIT-CMU", 2.0),
    _wheel("rich", "MIT", 1.0),
    _wheel("seaborn", "BSD-3-Clause", 1.0),
    _wheel("black", "MIT", 1.0),
    _wheel("fastapi", "MIT", 1.0),
    _wheel("starlette", "BSD-3-Clause", 1.0),
    _wheel("httpx", "BSD-3-Clause", 1.0),
    _wheel("flask", "BSD-3-Clause", 1.0),
    _wheel("jinja2", "BSD-3-Clause", 1.0),
    _wheel("click", "BSD-3-Clause", 1.0),
    _wheel("typer", "MIT", 1.0),
    _wheel("attrs", "MIT", 1.0),
    _wheel("requests", "Apache-2.0", 1.0),
    _wheel("pyyaml", "MIT", 1.0),
    Source(
        "python3.11-doc", "debian", "PSF-2.0", 12.0, ("usr/share/doc/python3.11/html/_sources",)
    ),
    Source("sqlite3-doc", "debian", "public domain", 6.0, ("usr/share/doc/sqlite3",)),
    Source(
        "postgresql-doc-15", "debian", "PostgreSQL", 5.0, ("usr/share/doc/postgresql-doc-15/html",)
    ),
    Source(
        "python-django-doc",
        "debian",
        "BSD-3-Clause",
        5.0,
        ("usr/share/doc/python-django-doc/html",),
    ),
    Source(
        "rust-doc",
        "debian",
        "MIT OR Apache-2.0",
        5.0,
        tuple(
            f"usr/share/doc/rust-doc/html/{book}"
            for book in (
                "book",
                "nomicon",
                "reference",
                "cargo",
                "rust-by-example",
                "edition-guide",
            )
        ),
    ),
)


def folder(source: Source, work: Path) -> Path:
    """Where the unpacked files of ``source`` lie."""
    if source.origin == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    return work / "sources" / source.name


def fetch(source: Source, work: Path) -> None:
    """Download and unpack ``source`` below ``work`` unless it is there."""
    target = folder(source, work)
    if target.exists():
        return
    packed = work / "packed"
    packed.mkdir(parents=True, exist_ok=True)
    if source.origin == "wheel":
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        subprocess.run([*command, "-d", str(packed), source.name], check=True)
        stem = source.name.replace("-", "_").lower()
        wheel = max(
            path for path in packed.glob("*.whl") if path.name.lower().split("-")[0] == stem
        )
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", ".md", ".rst"))]
            archive.extractall(target, names)
    else:
        subprocess.run(["apt-get", "download", source.name], check=True, cwd=packed)
        package = max(packed.glob(f"{source.name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)


def main(
    work: Annotated[Path, typer.Option(help="Working folder for everything downloaded and made.")],
) -> None:
    """Fetch every source (about 400 MB of packages; needs the package index and, for documentation,
    apt).
    """
    for source in SOURCES:
        fetch(source, work)
        print(f"{source.name}: {source.licence}, {folder(source, work)}")


if __name__ == "__main__":
    typer.run(main)
