"""schemathesis, which nobody here wrote, checks the API against its own OpenAPI document."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.faults.figures import record
from tests.serving.servers import RunningServer

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance,"
CHECKS += "response_headers_conformance,unsupported_method,not_a_server_error"


def test_api_conforms_to_its_schema(server: RunningServer, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, examples=6)


@pytest.mark.soak
def test_api_conforms_to_its_schema_for_long(server: RunningServer, tmp_path: Path) -> None:
    summary = run_schemathesis(server, tmp_path, examples=1000)
    match = re.search(r"(\d+) generated, (\d+) passed", summary)
    assert match
    assert match[1] == match[2]
    reached = f"{int(match[1]):,} of {int(match[2]):,} requests"
    record("Requests that schemathesis generates", "every response conforms to the OpenAPI document", reached)


def run_schemathesis(server: RunningServer, folder: Path, examples: int) -> str:
    """Return what schemathesis printed."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    command += [
        "--checks",
        CHECKS,
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--phases",
        "examples,coverage,fuzzing",
    ]
    command += ["--no-color", "--generation-database", "none", "--suppress-health-check", "all"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert server.post(b"still alive").status_code == 415
    metrics = httpx.get(f"{server.url}/metrics").text  # 501 is a documented response, 500 never is
    assert 'status="500"' not in metrics
    return result.stdout
