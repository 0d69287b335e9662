"""What the server's modules load, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_server_loads_none_of_its_packages() -> None:
    loaded = _loaded_by("import allotrope.server, allotrope.server.app")
    assert not loaded & {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "torch"}


@pytest.mark.parametrize("module", ["api", "prompts", "metrics", "handlers"])
def test_the_server_process_never_loads_torch(module: str) -> None:
    assert "torch" not in _loaded_by(f"import allotrope.engine.client, allotrope.server.{module}")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from allotrope.config import EngineConfig, ServerConfig
    from allotrope.errors import ConfigError
    from allotrope.server import app

    monkeypatch.setattr(app, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn\. Run: pip install 'allotrope\[server\]'"):
        app.serve(EngineConfig(model="x"), ServerConfig())
