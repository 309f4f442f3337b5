"""The OpenAPI description is valid, and requests made from it meet no answer that it does not have.
REQUESTS: how many at least (default 5000)."""
import json
import os
import subprocess
import sys
import tempfile
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from openapi_spec_validator import validate
from serving import server

with server("--metrics", "--timeout", "60", "--no-request-log", "--n-predict", "16") as address:
    with urllib.request.urlopen(address + "/openapi.json") as r:
        description = json.load(r)
    validate(description)
    # routes without a body have one request to make
    bodies = sum("requestBody" in o for path in description["paths"].values() for o in path.values())
    each = -(-int(os.environ.get("REQUESTS", "5000")) // bodies)
    program = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    done = subprocess.run(
        [program, "run", address + "/openapi.json", "--phases", "fuzzing", "--mode", "all",
         "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
         "response_schema_conformance", "--max-examples", str(each), "--seed", "1", "--no-color", "--workers", "1",
         "--suppress-health-check", "all"], stdin=subprocess.DEVNULL, cwd=tempfile.gettempdir())
    assert done.returncode == 0, "schemathesis found something"
