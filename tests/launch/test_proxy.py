"""Tests which proxies stand between a process and the coordinator, as gRPC sees it."""

import re

import pytest

from pipejax import launch
from pipejax.launch._proxy import check_proxy

from .helpers import OWN

PROXY = {"http_proxy": "http://user:word@proxy:3128"}

# What a process of JAX 0.10.2 that joined a coordinator at 127.0.0.1 was seen to do.
DIRECT = [
    {},
    {"HTTP_PROXY": "http://proxy:3128"},
    {"all_proxy": "http://proxy:3128"},
    {"https_proxy": "proxy:3128"},
    {"https_proxy": "socks5://proxy:3128"},
    {"grpc_proxy": "", "https_proxy": "http://proxy:3128"},
    PROXY | {"no_proxy": "127.0.0.1"},
    PROXY | {"no_proxy": "localhost, 127.0.0.0/8"},
    PROXY | {"no_proxy": "0.1"},
    PROXY | {"no_grpc_proxy": "127.0.0.1", "no_proxy": "elsewhere"},
]
BEHIND = [
    PROXY,
    {"http_proxy": "", "https_proxy": "http://proxy:3128"},
    {"grpc_proxy": "HTTP://proxy:3128"},
    PROXY | {"no_proxy": "*"},
    PROXY | {"no_proxy": ",10.0.0.0/8,"},
    PROXY | {"NO_PROXY": "127.0.0.1"},
    PROXY | {"no_grpc_proxy": "elsewhere", "no_proxy": "127.0.0.1"},
]


@pytest.mark.parametrize("environ", DIRECT)
def test_coordinator_without_a_proxy_is_accepted(environ):
    check_proxy("127.0.0.1:1234", environ)


@pytest.mark.parametrize("environ", BEHIND)
def test_coordinator_behind_a_proxy_is_refused(environ):
    with pytest.raises(ValueError, match="must not be set for the coordinator 127"):
        check_proxy("127.0.0.1:1234", environ)


@pytest.mark.parametrize("host", ["node0.cluster", "[fd00::7]"])
def test_no_proxy_may_name_hosts_and_ipv6_networks(host):
    name = host.strip("[]")
    for direct in (name, "node0.CLUSTER" if "." in host else "fd00::/8"):
        check_proxy(f"{host}:1234", PROXY | {"no_proxy": direct})
    with pytest.raises(ValueError, match=re.escape(f"Set no_proxy=other,{name} in")):
        check_proxy(f"{host}:1234", PROXY | {"no_proxy": "other"})


def test_proxy_error_names_the_variable_and_hides_the_password(environ, monkeypatch):
    environ(OWN)
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", PROXY["http_proxy"])
    message = (
        r"^`http_proxy` must not be set for the coordinator 10\.0\.0\.1:1234, because"
        r" .* no_proxy='' does not cover .* Set no_proxy=10\.0\.0\.1 in the environment"
    )
    with pytest.raises(ValueError, match=message) as caught:
        launch.initialize()
    assert "word" not in str(caught.value)
