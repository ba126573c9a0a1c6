"""``schedule collect --ray``: one process's results, also where a worker is lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from treegraft.config import parse_config
from treegraft.prompts import Prompt
from treegraft.scheduling.collection import Collection

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    here = Path(__file__).parents[2]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(here)}},
    )
    yield ray
    ray.shutdown()


def workers():
    """Processes that run one of our tasks."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [
        int(line.split()[0])
        for line in listed.stdout.splitlines()
        if "ray::_collect_remotely" in line
    ]


@pytest.mark.filterwarnings("default")
def test_a_cluster_gives_what_one_process_gives_and_a_lost_worker_loses_nothing(
    zoo, cluster, tmp_path
):
    config = parse_config(
        {
            "target": {"model": zoo.target},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": zoo.small}],
            "builder": {"kind": "layered", "depth": 2, "width": 2, "budget": 5},
            "stop": {"max_new_tokens": 12},
        }
    )
    prompts = [Prompt(f"p{i}", (i, 7, 20 + i, 7)) for i in range(12)]
    killed = []

    def lose_one(trace):
        running = workers()
        if not killed and running:
            os.kill(running[0], signal.SIGKILL)
            killed.append(running[0])

    spread = Collection(config, tmp_path / "spread", every=2)
    assert spread.run(prompts, ray="auto", on_prompt=lose_one).n_prompts == 12
    assert killed
    alone = Collection(config, tmp_path / "alone", every=2)
    alone.run(prompts)
    files = alone.folder.files()
    assert [f.name for f in files] == [f.name for f in spread.folder.files()]
    assert len(files) == 12
    for file in files:
        expected, found = load_file(file), load_file(tmp_path / "spread" / file.name)
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert (values == found[name]).all(), name
