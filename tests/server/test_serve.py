"""What `embertide serve` does before Triton starts."""

from pathlib import Path

import pytest

from embertide.server.adapters.process import ProcessError
from embertide.server.cli.serve import without_password


def test_a_password_goes_to_a_file_that_we_alone_can_read(tmp_path: Path) -> None:
    for url, user, rest in (
        ("redis://me:p%40ss@host:6380/2", "me@", "host:6380/2?"),
        ("redis://:p%40ss@host", "", "host?"),
        ("rediss://me:p%40ss@host?ssl_ca_certs=/ca", "me@", "host?ssl_ca_certs=/ca&"),
    ):
        path = tmp_path / "bus.password"
        scheme = url.partition("://")[0]
        want = f"{scheme}://{user}{rest}password_file={path}"
        assert without_password("bus", url, tmp_path) == want
        assert path.read_text() == "p@ss"
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_url_without_a_password_stays_as_it_is(tmp_path: Path) -> None:
    for url in (None, "redis://host:6379/0", "redis://me@host?password_file=/p", "unix:///run/r"):
        assert without_password("state", url, tmp_path) == url
    assert not list(tmp_path.iterdir())


def test_a_password_in_the_query_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"--bus has a password.*password_file=PATH") as caught:
        without_password("bus", "redis://host?username=u&password=hush", tmp_path)
    assert "hush" not in str(caught.value)
