"""A worker process that claims what it is told to: standard library only, speaks the protocol.

    python fake_worker.py LOG BEHAVIOURS

BEHAVIOURS is JSON: by method, and by ``open``, an object with ``seconds`` per text, ``tokens`` to
answer with (default: a function of the prompt), ``cpu`` seconds to claim, ``speed_by`` (an option
whose value divides the seconds), or ``act``: ``fail``, ``hang``, ``die`` or ``babble``. Each
request adds a line to LOG.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    log, behaviours = sys.argv[1], json.loads(sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        name = request.get("method", request["op"])
        behaviour = behaviours.get(name, {})
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"pid": os.getpid(), "name": name, **request}) + "\n")
        answer = {"ok": True, "versions": {"fake": "1"}, "threads": 1}
        act = behaviour.get("act")
        if act == "hang":
            time.sleep(60)
        elif act == "die":
            print("the model did not fit", file=sys.stderr)
            sys.exit(3)
        elif act == "babble":
            print("Loading weights: 100%", flush=True)
        elif act == "fail":
            answer = {"ok": False, "error": "ValueError: cannot do that"}
            answer["missing"] = behaviour.get("missing")
        elif request["op"] == "run":
            task = request["task"]
            default = [(sum(task["ids"]) + i) % 7 for i in range(task["max_new_tokens"])]
            divisor = request["options"].get(behaviour.get("speed_by"), 1)
            answer |= {
                "tokens": behaviour.get("tokens", default),
                "seconds": behaviour.get("seconds", 1.0) / divisor,
            }
            if "cpu" in behaviour:
                answer["cpu_seconds"] = behaviour["cpu"]
        elif request["op"] == "profile":
            answer |= {"steps": 4, "seconds_per_step": 0.2, "bare_seconds_per_step": 0.15}
        print(json.dumps(answer), flush=True)


main()
