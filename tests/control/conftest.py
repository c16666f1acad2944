"""A real Redis, emptied for each test, and what is started over it."""

import contextlib
from collections.abc import Iterator

import pytest
import redis
from control_bench import Bench

from embertide.server.adapters.redis import RedisOptions, RedisServer


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("redis") / "redis.log"
    with RedisServer(RedisOptions(log=log)) as server:
        yield server.url


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with contextlib.ExitStack() as stack:
        yield Bench(redis_url, stack)
