"""The generated code is checked in; it must be what the `.proto` file gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "protos/tollbridge/v1/gateway.proto"


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", PROTO, *outputs], cwd=ROOT, check=True)
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(generated) == 3
    assert generated == {path: (ROOT / path).read_text() for path in generated}, "run `make protos`"
