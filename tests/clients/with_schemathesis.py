"""
Schemathesis against the published document of a running gateway: `make test-clients`, ARGS="schemathesis".

It makes requests of the document, good ones and bad ones (wrong types, bounds, methods, keys, encodings), and holds
each answer against it. How many does not depend on how quick the machine is: only ids, which the gateway gives, differ
from run to run. To search, `seconds=600` repeats the last two phases for as long, `seed=7` takes other examples,
`phases=stateful` and `mode=negative` only these, and `examples=50` more of an operation; a failure prints the seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.clients.running import KEY, URL, main, scenario

HERE = Path(__file__).parent
ASKED = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
OPTIONS = {"seconds": "--max-time", "phases": "--phases", "mode": "--mode", "report": "--report-ndjson-path"}
#: Of an operation, in a run that says nothing else.
EXAMPLES = "12"
#: Within which a run has ended that is not told how long to search.
PATIENCE_S = 400


def keys_there_are() -> str:
    """Their ids. One of them is the key that asks; if that were revoked, nothing else would be tried."""
    asked = urllib.request.Request(f"{URL}/v1/keys", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return ",".join(key["id"] for key in json.load(answer)["data"])


@scenario
def every_answer_is_in_the_published_document() -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("--config-file", str(HERE / "schemathesis.toml"), "run", f"{URL}/openapi.json", "--no-color"),
        # One worker: two share caches of the library that makes the examples, and those are not made for threads.
        *("--header", f"Authorization: Bearer {KEY}", "--workers", "1", "--output-sanitize", "false"),
        *("--seed", ASKED.get("seed", "1"), "--max-examples", ASKED.get("examples", EXAMPLES)),
    ]
    for name, option in OPTIONS.items():
        if name in ASKED:
            command += [option, ASKED[name]]
    environ = {**os.environ, "CLIENTS_KEYS": keys_there_are()}
    # The time is a wish: an example in hand is brought to its end.
    patience_s = PATIENCE_S + int(ASKED.get("seconds", "0"))
    run = subprocess.run(command, env=environ, check=False, timeout=patience_s, capture_output=True, text=True)
    if "report" in ASKED:
        print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    # A run in which nothing could be asked would hold, too.
    assert " generated" in run.stdout, run.stdout


if __name__ == "__main__":
    sys.argv[1:] = [word for word in sys.argv[1:] if "=" not in word]
    main("schemathesis")
