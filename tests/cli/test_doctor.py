from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvkeep.cli import doctor, main
from kvkeep.prefixstore.store import open_store


def test_a_sound_machine_has_no_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    result = CliRunner().invoke(main, ["doctor", "--store", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data) == {
        "kvkeep",
        "python",
        "platform",
        "device",
        "packages",
        "store",
        "problems",
    }
    assert data["problems"] == []
    assert data["store"]["mode"] == "0700"
    assert data["store"]["free_bytes"] > 0
    assert all(data["packages"].values())


def test_it_creates_nothing_and_looks_at_the_folder_above(tmp_path: Path) -> None:
    store = tmp_path / "a" / "b"
    result = CliRunner().invoke(main, ["doctor", "--store", str(store)])
    assert result.exit_code == 0, result.output
    assert "not there yet" in result.stdout
    assert "No problem found." in result.stdout
    assert not store.parent.exists()


def test_a_folder_that_others_may_read_is_named_with_its_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    result = CliRunner().invoke(main, ["doctor", "--store", str(tmp_path)])
    assert result.exit_code == 0
    assert f"problem: others may read {tmp_path} (mode 0755)\n  chmod 700" in result.stdout


def test_a_folder_that_no_command_could_use_is_fatal(tmp_path: Path) -> None:
    open_store(tmp_path / "damaged").close()
    with (tmp_path / "damaged" / "data.mdb").open("r+b") as file:
        file.write(b"\xff" * 64)
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "other" / "notes.txt").touch()
    for name, said, code in (
        ("damaged", "no meta page", 4),
        ("other", "holds other files", 6),
    ):
        store = str(tmp_path / name)
        result = CliRunner().invoke(main, ["doctor", "--store", store, "--json"])
        assert result.exit_code == 6, result.output
        (problem,) = json.loads(result.stdout)["problems"]
        assert said in problem["what"]
        assert problem["remedy"]
        assert CliRunner().invoke(main, ["ls", "--store", store]).exit_code == code


def test_a_network_disk_and_a_missing_package_are_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "filesystem", lambda _folder: "nfs4")
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "no-such-package"))
    result = CliRunner().invoke(main, ["doctor", "--store", str(tmp_path / "x"), "--json"])
    assert result.exit_code == 6
    fatal = [p["what"] for p in json.loads(result.stdout)["problems"] if p["fatal"]]
    assert len(fatal) == 2
    assert "network file system (nfs4)" in fatal[0]
    assert fatal[1] == "no-such-package is not installed"
