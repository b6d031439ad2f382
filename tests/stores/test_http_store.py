from __future__ import annotations

import os
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import nginx as webdav
import pytest
from conformance import StoreConformance, name_of
from pydantic import SecretStr

from cachegen_rag.bench.server import ALWAYS_MISS, FAULTS, PLACED, Fault, Link, ObjectServer
from cachegen_rag.errors import (
    BitstreamError,
    ConfigError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from cachegen_rag.stores import open_store
from cachegen_rag.stores.http_limits import Health

CANARY = "canary-5b1f"
DATA = os.urandom(300_000)
KEY = name_of(DATA)

needs_nginx = [pytest.mark.nginx, pytest.mark.skipif(webdav.missing() is not None, reason=str(webdav.missing()))]


@pytest.fixture
def server():
    with ObjectServer() as server:
        server.objects[f"/cas/{KEY}"] = DATA
        yield server


class TestHTTPStore(StoreConformance):
    lists = False

    @pytest.fixture
    def store(self):
        with ObjectServer() as server:
            store = open_store(server.url, token=CANARY)
            yield store
            store.close()


@pytest.fixture(scope="module")
def nginx_url(tmp_path_factory):
    with webdav.nginx(tmp_path_factory.mktemp("nginx")) as url:
        yield url


@pytest.fixture(scope="module")
def nginx_tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nginx-tls")
    with webdav.nginx(folder, tls=True) as url:
        yield url, folder / "cert.pem"


class TestNginx(StoreConformance):
    pytestmark = needs_nginx
    lists = False

    @pytest.fixture
    def store(self, nginx_url):
        store = open_store(f"{nginx_url}/{os.urandom(4).hex()}/base/")
        yield store
        store.close()

    def test_takes_up_a_range(self, store):
        store.put("cas", KEY, DATA)
        read = store._client  # the loop is running
        assert read is not None
        response = store._submit(store._client.get(f"{store.url}/cas/{KEY}", headers={"Range": "bytes=1000-"})).result()
        assert response.status_code == 206 and response.content == DATA[1000:]


class TestNginxHTTP2(StoreConformance):
    pytestmark = needs_nginx
    lists = False

    @pytest.fixture
    def store(self, nginx_tls):
        url, certificate = nginx_tls
        store = open_store(f"{url}/{os.urandom(4).hex()}", ca_file=certificate, http2=True)
        yield store
        store.close()

    def test_speaks_http2(self, store):
        store.put("cas", KEY, DATA)
        response = store._submit(store._client.get(f"{store.url}/cas/{KEY}")).result()
        assert response.http_version == "HTTP/2"

    def test_an_unknown_authority_is_refused(self, nginx_tls):
        with pytest.raises(StoreUnavailableError, match="ca_file"):
            open_store(nginx_tls[0], token=CANARY).get("cas", KEY)


class TestURLs:
    @pytest.mark.parametrize(
        ("url", "match"),
        [
            ("http://example.com/x", "loopback"),
            ("http://169.254.169.254/", "loopback"),
            ("http://10.0.0.1", "loopback"),
            (f"https://user:{CANARY}@host/x", "credentials"),
            (f"https://{CANARY}@host/x", "credentials"),
            ("https:///x", "https://host"),
            ("https://host/x?y=1", "query"),
            ("https://host/x#y", "fragment"),
            ("https://host:99999/", "malformed"),
            ("https://[::1/", "malformed"),
            ("https://host/a/../b", "characters"),
            ("https://host/a b", "characters"),
            (f"https://host?token={CANARY}", "query"),
            (f"https://host#{CANARY}", "fragment"),
            (f"https://host:{CANARY}/x", "malformed"),
            (f"https://host/{CANARY}/../x", "characters"),
            (f"http://example.com/{CANARY}", "loopback"),
            (f"http:/{CANARY}", "https://host"),
            (f"file:///x?{CANARY}", "file store"),
            (f"file://{CANARY}/x", "file store"),
        ],
    )
    def test_are_checked(self, url, match):
        with pytest.raises(ConfigError, match=match) as caught:
            open_store(url)
        assert CANARY not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1:1/x", "http://[::1]:1", "http://localhost:1", "https://host/base"]
    )
    def test_that_are_fine(self, url):
        store = open_store(url)
        assert store.url == url and store.remote
        store.close()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"tokne": "t"}, {"size": 1}, {"timeout": -1}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": "1s"},
            {"timeout": True}, {"attempts": 0}, {"attempts": -1}, {"attempts": True}, {"attempts": 1.5},
            {"connections": 0}, {"connections": "6"}, {"http2": "yes"}, {"ca_file": 5}, {"tier": 3}, {"auth": "x"},
            {"auth": ("x",)}, {"write_back": True}, {"write_back": "yes"}, {"token": 5},
        ],
        ids=repr,
    )  # fmt: skip
    def test_a_wrong_option_is_named(self, wrong):
        (name,) = wrong
        with pytest.raises(ConfigError, match="credentials" if name == "token" else name):
            open_store("http://127.0.0.1:1/x", **wrong)

    def test_options(self, tmp_path):
        with pytest.raises(ConfigError, match="exclude"):
            open_store("https://host", token="a", auth=("b", "c"))
        with pytest.raises(ConfigError, match="header") as caught:
            open_store("https://host", token=f"{CANARY}\r\nX: y")
        assert CANARY not in str(caught.value)
        with pytest.raises(ConfigError, match="ca_file"):
            open_store("https://host", ca_file=tmp_path / "none.pem")


class TestCredentials:
    @pytest.mark.parametrize("token", [CANARY, SecretStr(CANARY)])
    def test_bearer(self, server, token):
        store = open_store(server.url, token=token)
        assert store.get("cas", KEY) == DATA
        assert server.headers[-1]["authorization"] == f"Bearer {CANARY}"
        store.close()

    def test_basic(self, server):
        store = open_store(server.url, auth=("me", SecretStr(CANARY)))
        store.get("cas", KEY)
        assert server.headers[-1]["authorization"].startswith("Basic ")
        store.close()

    @pytest.mark.parametrize("kind", sorted(ALWAYS_MISS))
    def test_never_appear(self, server, kind, caplog):
        server.fault = lambda *request: Fault(kind)
        store = open_store(server.url, token=CANARY, timeout=0.3, attempts=2)
        seen = [repr(store), repr(vars(store).get("_health"))]
        try:
            store.get("cas", KEY, max_bytes=len(DATA), deadline=time.monotonic() + 1)
        except StoreError as error:
            while error is not None:
                seen += [str(error), repr(error)]
                error = error.__cause__ or error.__context__
        except BitstreamError as error:
            seen.append(str(error))
        assert CANARY not in "".join(seen) + caplog.text
        store.close()

    def test_nothing_is_taken_from_the_environment(self, server, monkeypatch, tmp_path):
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login x password {CANARY}")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        store = open_store(server.url)
        assert store.get("cas", KEY) == DATA
        assert "authorization" not in server.headers[-1] and server.headers[-1]["accept-encoding"] == "identity"
        store.close()


EVERYWHERE = [(kind, at) for kind in FAULTS for at in ((0.0, 0.5, 0.999) if kind in PLACED else (0.5,))]


def verified(store, **options):
    """What a caller would accept: the object if its hash is right, None for a miss; or the error."""
    data = store.get("cas", KEY, max_bytes=len(DATA), **options)
    return data if data is not None and name_of(data) == KEY else None


class TestFaults:
    @pytest.mark.parametrize(
        ("kind", "at"), [(k, at) for k in FAULTS for at in ((0.0, 0.5, 0.999) if k in PLACED else (0.5,))]
    )
    def test_every_time(self, server, kind, at):
        """No wrong bytes are accepted, nothing hangs beyond the deadline, and nothing but our errors comes out."""
        server.objects["/cas/other"] = os.urandom(1000)
        server.fault = lambda *request: Fault(kind, at)
        store = open_store(server.url, timeout=0.2)
        began = time.monotonic()
        try:
            # the last bytes of a slow but whole answer may well arrive in time
            assert verified(store, deadline=began + 0.5) is None or (kind, at) == ("drip", 0.999)
        except (StoreError, BitstreamError):
            pass
        assert time.monotonic() - began < 1.0
        store.close()

    @pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
    @pytest.mark.parametrize(
        "kind",
        [
            "stall",
            "reset",
            "reset before head",
            "truncate",
            "chunked cut",
            "not http",
            "408",
            "429",
            "500",
        ],
    )
    def test_once(self, server, kind, at):
        server.fault = lambda method, path, number: Fault(kind, at) if number == 0 else None
        store = open_store(server.url, timeout=0.4)
        assert verified(store, deadline=time.monotonic() + 5) == DATA
        store.close()

    @pytest.mark.parametrize("kind", ["truncate", "reset", "stall"])
    def test_a_broken_transfer_is_taken_up_where_it_broke(self, server, kind):
        server.fault = lambda method, path, number: Fault(kind, 0.5) if number == 0 else None
        store = open_store(server.url, timeout=0.4)
        pieces = []
        assert store.fetch("cas", KEY, on_bytes=pieces.append).result() == DATA
        assert server.headers[1]["range"].startswith("bytes=1") and sum(pieces) < 1.1 * len(DATA)
        store.close()

    @pytest.mark.parametrize("second", ["range unasked", "404", "garbage", "another object"])
    def test_a_lie_about_the_rest(self, server, second):
        faults = [Fault("truncate", 0.5), Fault(second, 0.3)]
        server.fault = lambda method, path, number: faults[number] if number < 2 else None
        store = open_store(server.url, timeout=0.4)
        try:
            assert verified(store, deadline=time.monotonic() + 3) in (None, DATA)
        except (StoreError, BitstreamError):
            pass
        store.close()

    def test_a_manifest_is_not_patched_together(self, server):
        server.objects[f"/ac/{KEY}"] = b"1" * 100_000

        def fault(method, path, number):
            if number == 0:
                return Fault("truncate", 0.5)
            server.objects[f"/ac/{KEY}"] = b"2" * 100_000
            return None

        server.fault = fault
        store = open_store(server.url)
        assert store.get("ac", KEY) == b"2" * 100_000
        store.close()

    @pytest.mark.parametrize("kind", ["413", "507"])
    def test_a_full_server(self, server, kind):
        server.fault = lambda *request: Fault(kind)
        store = open_store(server.url)
        with pytest.raises(StoreFullError, match=kind):
            store.put("cas", KEY, DATA)
        assert len(server.log) == 1
        store.close()

    @pytest.mark.parametrize("kind", ["401", "403", "405", "301", "redirect"])
    def test_a_refusal_is_not_retried(self, server, kind):
        server.fault = lambda *request: Fault(kind)
        store = open_store(server.url)
        with pytest.raises(StoreUnavailableError, match=kind if kind != "redirect" else "redirects are not followed"):
            store.get("cas", KEY)
        assert len(server.log) == 1
        store.close()

    @pytest.mark.parametrize("kind", ["reset", "503", "silent", "reset before head"])
    def test_a_put_is_retried(self, server, kind):
        server.fault = lambda method, path, number: Fault(kind) if number == 0 else None
        store = open_store(server.url, timeout=0.4)
        data = os.urandom(200_000)
        store.put("cas", name_of(data), data, deadline=time.monotonic() + 5)
        assert server.objects[f"/cas/{name_of(data)}"] == data
        store.close()

    def test_nobody_is_there(self):
        store = open_store("http://127.0.0.1:9", timeout=1)
        with pytest.raises(StoreUnavailableError, match="127"):
            store.get("cas", KEY)
        store.close()

    def test_forms_of_retry_after(self):
        from cachegen_rag.stores.http import _retry_after

        assert _retry_after("2") == 2.0 and _retry_after("999999") == 60.0
        assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
        assert [_retry_after(v) for v in (None, "", "-3", "soon", "1e9", "²")] == [None] * 6

    def test_retry_after_is_honoured_within_the_deadline(self, server):
        server.fault = lambda method, path, number: Fault("503") if number == 0 else None
        store = open_store(server.url)
        began = time.monotonic()
        assert store.get("cas", KEY, deadline=began + 5) == DATA
        assert 1.0 <= server.log[1][0] - server.log[0][0] < 2
        began = time.monotonic()
        server.fault = lambda *request: Fault("503")
        with pytest.raises(StoreUnavailableError, match="503"):
            store.get("cas", KEY, deadline=began + 0.5)  # a second would be too late: say so at once
        assert time.monotonic() - began < 0.4
        store.close()


class TestNoRetryStorm:
    def test_a_server_that_only_answers_500(self, server):
        server.fault = lambda *request: Fault("500")
        store = open_store(server.url)
        requests = 200
        for _ in range(requests):
            with pytest.raises(StoreUnavailableError):
                store.get("cas", KEY, deadline=time.monotonic() + 1)
        assert len(server.log) <= 1.1 * requests
        store.close()

    def test_no_request_is_sent_after_its_deadline(self, server):
        server.fault = lambda *request: Fault("500")
        store = open_store(server.url)
        for _ in range(3):
            deadline = time.monotonic() + 0.3
            with pytest.raises(StoreError):
                store.get("cas", KEY, deadline=deadline)
            time.sleep(0.6)
            assert server.log[-1][0] <= deadline + 0.05
        store.close()

    def test_a_dead_server_is_left_alone_and_asked_again_later(self):
        now = [0.0]
        health = Health(clock=lambda: now[0])
        for _ in range(Health.FAILURES):
            health.admit("s")
            health.failed("HTTP 500")
        with pytest.raises(StoreUnavailableError, match=r"3 times.*HTTP 500.*0\.5 s"):
            health.admit("s")
        now[0] = 0.6
        health.admit("s")  # the probe
        with pytest.raises(StoreUnavailableError):
            health.admit("s")
        health.failed("HTTP 500")
        now[0] = 1.5
        with pytest.raises(StoreUnavailableError):
            health.admit("s")
        now[0] = 1.7
        health.admit("s")
        health.succeeded()
        health.admit("s")
        health.admit("s")

    def test_the_budget_caps_retries(self):
        health = Health()
        retries = sum((health.admit("s"), health.may_retry())[1] for _ in range(1000))
        assert retries <= 0.1 * 1000 + Health.BUDGET

    def test_rest_is_bounded(self):
        health = Health(clock=lambda: 0.0)
        for _ in range(2000):
            health.failed("x")
        with pytest.raises(StoreUnavailableError, match=r"30\.0 s"):
            health.admit("s")


class TestFetch:
    def test_tells_how_bytes_arrive(self, server):
        server.link = Link(rate=1e6)
        store = open_store(server.url)
        arrivals = []
        future = store.fetch("cas", KEY, on_bytes=lambda n: arrivals.append((time.monotonic(), n)))
        assert future.result() == DATA
        assert arrivals[0][1] == 0 and sum(n for _, n in arrivals) == len(DATA)
        assert arrivals[-1][0] - arrivals[0][0] == pytest.approx(0.3, abs=0.15)
        store.close()

    def test_cancelling_ends_the_transfer_and_frees_the_slot(self, server):
        server.link = Link(rate=1e5)
        store = open_store(server.url, connections=1)
        started = threading.Event()
        future = store.fetch("cas", KEY, on_bytes=lambda n: started.set())
        assert started.wait(5)
        assert future.cancel()
        server.link = Link()
        assert store.get("cas", KEY, deadline=time.monotonic() + 2) == DATA
        store.close()

    def test_the_earliest_deadline_comes_first(self, server):
        server.link = Link(rate=3e6)
        store = open_store(server.url, connections=1)
        order = []

        def begin(label, priority):
            future = store.fetch("cas", KEY, priority=priority)
            future.add_done_callback(lambda f: order.append(label))
            return future

        futures = [begin("first", 9.0)]
        while not server.log:
            time.sleep(0.005)
        futures += [
            begin(label, priority) for label, priority in [("late", 3.0), ("never", float("inf")), ("soon", 1.0)]
        ]
        for future in futures:
            assert future.result() == DATA
        assert order == ["first", "soon", "late", "never"]
        store.close()

    def test_closing_ends_what_is_under_way(self, server):
        server.fault = lambda *request: Fault("silent")
        store = open_store(server.url)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "cas", KEY)
            while not server.log:
                time.sleep(0.005)
            store.close()
            with pytest.raises(StoreUnavailableError, match="closed"):
                waiting.result(timeout=5)

    def test_leaves_no_thread_or_descriptor(self, server):
        def count():
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("no /proc here")
        before = count()
        for _ in range(5):
            store = open_store(server.url)
            assert store.get("cas", KEY) == DATA
            store.close()
        time.sleep(0.1)
        assert count() == before

    def test_works_in_a_forked_child(self, server):
        store = open_store(server.url)
        assert store.get("cas", KEY) == DATA
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("cas", KEY, deadline=time.monotonic() + 5) == DATA else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.close()
