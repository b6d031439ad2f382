from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import TOKENS, FakeCodec, Library, drive, target

from cachegen_rag.bench.server import ALWAYS_MISS, PLACED, Fault, Link, ObjectServer
from cachegen_rag.errors import StoreUnavailableError
from cachegen_rag.manifest import Segment
from cachegen_rag.stores import open_store
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.outlook import decode_key
from cachegen_rag.streaming.parts import Ready
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.streaming.policy import FixedLevel

SPEED = 2560.0  # tokens a second: a chunk is computed in 0.1 s
TEXT = 6 * TOKENS / SPEED


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


def make_loader(store, rate=None, *, known=True, trip=0.001, speed=SPEED, **options):
    costs = Costs()
    if known:
        costs.text("engine").record(TOKENS, 0, TOKENS / speed)
    if rate is not None:
        costs.record_link(store.url, rate, trip)
    return Loader(store, "engine", costs=costs, **options)


@pytest.fixture
def remote(server):
    store = open_store(server.url, timeout=0.5)
    yield store
    store.close()


class TestLocal:
    @pytest.fixture(params=["memory", "disk"])
    def store(self, request, tmp_path):
        store = open_store("memory://" if request.param == "memory" else tmp_path / "store")
        yield store
        store.close()

    def test_everything_is_taken(self, store):
        library, loader = Library(store, FakeCodec()), make_loader(store)
        run = drive(loader, library, speed=SPEED)
        assert run.taken == [TOKENS] * 6 and run.reasons == [None] * 6
        assert run.seconds < TEXT
        assert [o.bytes for o in run.transfer.outcomes] == [60_000] * 6
        assert {e.what for e in run.transfer.events} == {"fetch", "decode"}
        loader.close()

    def test_a_missing_or_damaged_chunk_costs_only_itself(self, store):
        library, loader = Library(store, FakeCodec()), make_loader(store)
        store.delete("cas", library.chunks[2].levels[0].segments[0].sha256)
        bad = b"bad!" + bytes(100)
        library.chunks[4] = type(library.chunks[4])(4 * TOKENS, 5 * TOKENS, (
            type(library.chunks[4].levels[0])(1, 0.1, (Segment.of(bad),)),
        ))  # fmt: skip
        store.put("cas", Segment.of(bad).sha256, bad)
        run = drive(loader, library, speed=SPEED)
        assert run.taken == [TOKENS, TOKENS, 0, TOKENS, 0, TOKENS]
        assert "gone" in run.reasons[2] and run.reasons[4] == "CorruptBitstreamError: not a bitstream"
        loader.close()

    def test_a_level_that_is_not_stored(self, store):
        library, loader = Library(store, FakeCodec()), make_loader(store)
        run = drive(loader, library, level=3)
        assert run.taken == [0] * 6 and run.reasons[0] == "level 3 is not stored"
        loader.close()

    @pytest.mark.costs
    def test_a_store_slower_than_computing_is_not_asked_and_says_so(self, store):
        library, loader = Library(store, FakeCodec(0.15)), make_loader(store)
        slow = drive(loader, library, speed=50 * SPEED)
        assert slow.taken[0] == TOKENS  # nothing was known yet
        for _ in range(12):
            loader.text.record(TOKENS, 0, TOKENS / SPEED / 50)
        run = drive(loader, library, speed=50 * SPEED)
        assert run.taken == [0] * 6
        assert "computing is faster here" in run.reasons[0]
        for _ in range(200):  # trust in an old measurement fades
            run = drive(loader, library, speed=1e9)
            if run.taken[0]:
                break
        assert run.taken[0] == TOKENS
        loader.close()

    def test_closing_early_waits_for_what_runs(self, store):
        library = Library(store, FakeCodec(0.05), count=12)
        loader = make_loader(store)
        transfer = loader.open(library.parts())
        for i in range(12):
            transfer.attach(i, target())
        transfer.next(0, 0)
        transfer.close()
        assert library.codec.running == 0
        transfer.close()
        time.sleep(0.1)
        assert library.codec.running == 0
        loader.close()

    @pytest.mark.parametrize("when", ["before opening", "before attaching", "while decoding"])
    def test_a_closed_loader_is_a_reason_and_nobody_waits(self, store, when):
        library = Library(store, FakeCodec(0.05), count=12)
        loader = make_loader(store)
        if when == "before opening":
            loader.close()
        transfer = loader.open(library.parts())
        if when == "before attaching":
            loader.close()
        for i in range(12):
            transfer.attach(i, target())
        if when == "while decoding":
            loader.close()
        with ThreadPoolExecutor(1) as pool:
            advice = [pool.submit(transfer.next, i, 0).result(10) for i in range(12)]
        ready = [isinstance(one, Ready) for one in advice]
        assert sum(ready) < 12 and (when == "while decoding" or not any(ready))
        assert all(done or one.reason == "the cache was closed" for done, one in zip(ready, advice, strict=True))
        transfer.close()
        loader.close()


class TestRemote:
    def test_a_fast_link(self, server, remote):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        loader.look_up(["a" * 64])  # connected, as after every look-up
        run = drive(loader, library, speed=SPEED)
        assert run.taken[2:] == [TOKENS] * 4 and run.seconds < 1.5 * TEXT
        loader.close()

    def test_an_unknown_model_and_an_unknown_link(self, server, remote):
        library, loader = Library(server, FakeCodec()), make_loader(remote, known=False)
        run = drive(loader, library, speed=SPEED)
        assert sum(run.taken) >= 4 * TOKENS and run.seconds < 1.5 * TEXT
        loader.close()

    @pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
    def test_both_ends_at_the_cross_over(self, server, remote, prior):
        """Link and model each need as long for all of it; together each does a part. (How fast: bench stream.)"""
        library = Library(server, FakeCodec(), count=12)
        server.link = Link(rate=12 * 60_000 / (2 * TEXT))
        loader = make_loader(remote, prior * 12 * 60_000 / (2 * TEXT))
        run = drive(loader, library, speed=SPEED)
        assert 3 * TOKENS <= sum(run.taken) <= 9 * TOKENS
        assert run.seconds < 4 * TEXT
        assert sum(run.taken[:6]) < sum(run.taken[6:]) or prior != 1.0  # the front was computed, the back fetched
        loader.close()

    @pytest.mark.parametrize("share", [0.5, 1.0])
    def test_the_engine_and_decoding_take_turns(self, server, remote, share):
        """Both want every core: an engine slowed down by a decoder is slowed down more than the decoder gains."""
        library = Library(server, FakeCodec(0.02), count=12)
        server.link = Link(rate=12 * 60_000 / (2 * TEXT) / share)
        loader = make_loader(remote, 12 * 60_000 / (2 * TEXT) / share)
        run = drive(loader, library, speed=SPEED)
        assert run.computing and library.codec.spans
        for began, ended in run.computing:
            assert not [span for span in library.codec.spans if span[0] < ended - 1e-3 and span[1] > began + 1e-3]
        loader.close()

    def test_decoding_costs_what_it_takes_from_the_engine(self, server, remote):
        """Two decoders side by side cost half of their time each."""
        codec = FakeCodec(0.1)
        library = Library(server, codec, sizes=(20_000, 5_000), count=8)
        loader = make_loader(remote, 1e8, speed=SPEED / 100, threads=2)
        for _ in range(2):
            drive(loader, library, speed=SPEED / 100)
        measured = loader.costs.mean(decode_key(codec, 1), 9.0) * TOKENS
        assert 0.045 < measured < 0.09
        loader.close()

    def test_a_level_never_decoded_is_taken_to_cost_what_the_nearest_does(self, server, remote):
        codec = FakeCodec()
        library, loader = Library(server, codec, sizes=(4000, 3000, 2000, 1000), count=1), make_loader(remote, 1e8)
        for level, seconds in ((1, 4e-3), (3, 2e-3)):
            for _ in range(2):  # the first of a process only warms up
                loader.costs.record(decode_key(codec, level), seconds)
        transfer = loader.open(library.parts(), due=time.monotonic() + 5)
        assert transfer._decodes[:, 0] / TOKENS == pytest.approx([4e-3, 4e-3, 2e-3, 2e-3])
        transfer.close()
        loader.close()

    def test_the_first_decision_knows_what_decoding_costs(self, server, remote):
        """It is made before any target says where decoding takes place."""
        codec = FakeCodec()
        library, loader = Library(server, codec, sizes=(2000, 1900)), make_loader(remote, 1e8, speed=100.0)
        for level, seconds in ((1, 4e-3), (2, 1e-3)):
            for _ in range(2):  # the first of a process only warms up
                loader.costs.record(decode_key(codec, level), seconds)
        transfer = loader.open(library.parts(), due=time.monotonic() + 1e-3, prefix=400)
        assert transfer.outcomes[0].level == 2
        transfer.close()
        loader.close()

    def test_half_of_a_chunk_is_not_computed_for_nothing(self, server, remote):
        """Each chunk comes sooner than it could be computed, and later than a slice of it could."""
        library, speed = Library(server, FakeCodec(), count=5), SPEED / 4
        server.link = Link(rate=60_000 / (0.6 * TOKENS / speed))
        loader = make_loader(remote, 60_000 / (0.6 * TOKENS / speed), speed=speed, planner=FixedLevel(0))
        run = drive(loader, library, speed=speed)
        assert run.taken == [TOKENS] * 5 and not run.computing
        loader.close()

    def test_a_chunk_that_comes_too_late_is_computed(self, server, remote):
        library, speed = Library(server, FakeCodec(), count=5), SPEED
        server.link = Link(rate=60_000 / (3 * TOKENS / speed))
        loader = make_loader(remote, 60_000 / (3 * TOKENS / speed), speed=speed, planner=FixedLevel(0))
        run = drive(loader, library, speed=speed)
        assert sum(run.taken) <= 3 * TOKENS and run.seconds < 1.6 * 5 * TOKENS / speed
        loader.close()

    def test_a_slow_link_costs_nothing(self, server, remote):
        library = Library(server, FakeCodec())
        server.link = Link(rate=2e4)
        loader = make_loader(remote, 1e8)  # and it was fast yesterday
        run = drive(loader, library, speed=SPEED)
        assert run.seconds < 2 * TEXT
        assert all(reason or taken for reason, taken in zip(run.reasons, run.taken, strict=True))
        loader.close()

    def test_total_time_is_the_networks_where_the_network_is_slowest(self, server, remote):
        library = Library(server, FakeCodec(0.01), count=8)
        server.link = Link(rate=1e6)
        loader = make_loader(remote, 1e6, speed=SPEED / 100)
        run = drive(loader, library, speed=SPEED / 100)
        assert sum(run.taken) == 8 * TOKENS
        assert run.seconds < 1.15 * 8 * 60_000 / 1e6 + 1.0
        loader.close()

    def test_round_trips_are_hidden(self, server, remote):
        library = Library(server, FakeCodec(), count=8)
        server.link = Link(rate=1e6, delay=0.05)
        loader = make_loader(remote, 1e6, trip=0.05, speed=SPEED / 100)
        run = drive(loader, library, speed=SPEED / 100)
        assert run.seconds < 8 * (60_000 / 1e6 + 0.08)
        loader.close()

    @pytest.mark.parametrize("at", [0.1, 0.9])
    @pytest.mark.parametrize("kind", sorted(PLACED | {"silent", "reset before head"}))
    def test_a_fault_in_every_transfer(self, server, remote, kind, at):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        server.fault = lambda *request: Fault(kind, at)
        run = drive(loader, library, speed=SPEED)
        assert run.seconds < 3 * TEXT + 0.5
        assert sum(run.taken) == 0 and all(run.reasons)
        loader.close()

    @pytest.mark.parametrize("kind", sorted(ALWAYS_MISS - PLACED - {"another object"}))
    def test_a_wrong_answer_now_and_then(self, server, remote, kind):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        server.fault = lambda method, path, number: Fault(kind) if number % 2 else None
        run = drive(loader, library, speed=SPEED)
        assert run.seconds < 3 * TEXT + 0.5
        assert sum(run.taken) > 0
        loader.close()

    def test_a_link_that_dies_half_way(self, server, remote):
        library = Library(server, FakeCodec(), count=8)
        server.link = Link(rate=lambda t: 1e6 if t < 0.25 else 1.0, start=time.monotonic())
        loader = make_loader(remote, 1e6)
        run = drive(loader, library, speed=SPEED)
        assert run.seconds < 8 * TOKENS / SPEED * 5  # not the hours that the link would take
        assert sum(run.taken) < 8 * TOKENS
        loader.close()

    def test_a_target_chooses_levels(self, server, remote):
        library = Library(server, FakeCodec(), sizes=(90_000, 60_000, 30_000, 15_000), count=8)
        server.link = Link(rate=8 * 30_000 / 0.5)
        read = {}
        for due in (0.45, 0.8, 3.0):
            loader = make_loader(remote, 8 * 30_000 / 0.5, speed=SPEED / 4)
            run = drive(loader, library, speed=SPEED / 4, due=due)
            read[due] = sum(o.level for o, n in zip(run.transfer.outcomes, run.taken, strict=True) if n)
            assert run.seconds < due * 1.5 or due < 0.5
            loader.close()
        assert read[0.45] > read[0.8] > read[3.0]

    @pytest.mark.parametrize("tiered", [False, True])
    @pytest.mark.parametrize("due", [None, 0.2])
    def test_a_level_that_is_not_stored_is_never_asked_for(self, server, tmp_path, due, tiered):
        store = open_store(server.url, timeout=0.5, **({"tier": tmp_path} if tiered else {}))
        library, loader = Library(server, FakeCodec()), make_loader(store, 1e8)
        run = drive(loader, library, speed=SPEED, level=3, due=due)  # with a target another level is read
        read = {outcome.level for outcome in run.transfer.outcomes if outcome.bytes}
        assert read == set() if due is None else read <= {1}
        assert due is not None or run.reasons == ["level 3 is not stored"] * 6
        loader.close()
        store.close()

    def test_the_earlier_deadline_is_served_first(self, server):
        store = open_store(server.url, connections=1)
        libraries = [Library(server, FakeCodec(), count=6), Library(server, FakeCodec(), sizes=(60_001,), count=6)]
        server.link = Link(rate=6 * 60_000 / 0.6)
        loader = make_loader(store, 6e5, speed=10.0)
        seconds = {}

        def request(name, library, due):
            seconds[name] = drive(loader, library, speed=10.0, due=due).seconds

        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(request, "late", libraries[0], 9.0)
            time.sleep(0.05)
            pool.submit(request, "soon", libraries[1], 1.5).result()
            late.result()
        assert seconds["soon"] < seconds["late"] - 0.2
        loader.close()
        store.close()

    def test_bytes_arrive_before_the_engine_is_free(self, server, remote):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        transfer = loader.open(library.parts())
        time.sleep(0.3)
        began = time.monotonic()
        transfer.attach(0, target())
        assert transfer.next(0, 0).__class__.__name__ == "Ready"
        assert time.monotonic() - began < 0.05
        transfer.close()
        loader.close()

    def test_a_closed_store_is_a_reason(self, server, remote):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        remote.close()
        run = drive(loader, library, speed=50 * SPEED)
        assert sum(run.taken) == 0 and "closed" in run.reasons[0]
        loader.close()

    def test_closing_early_stops_the_transfers(self, server, remote):
        library, loader = Library(server, FakeCodec()), make_loader(remote, 1e8)
        assert remote.get("cas", "a" * 64) is None  # the network's thread runs
        server.fault = lambda *request: Fault("stall")
        before = threading.active_count()
        for _ in range(5):
            transfer = loader.open(library.parts())
            transfer.attach(0, target())
            transfer.close()
        assert not loader.busy() and loader.bytes_in_flight() == 0
        loader.close()
        assert threading.active_count() <= before

    def test_fixed_levels_and_no_filling_for_comparison(self, server, remote):
        library = Library(server, FakeCodec(), sizes=(60_000, 30_000))
        loader = make_loader(remote, 1e8, planner=FixedLevel(0), fill=False)
        run = drive(loader, library, speed=SPEED, level=2)
        assert run.taken == [TOKENS] * 6 and {o.level for o in run.transfer.outcomes} == {2}
        loader.close()

    def test_what_was_measured_is_remembered(self, server, remote, tmp_path):
        library = Library(server, FakeCodec())
        server.link = Link(rate=1e6)
        loader = Loader(remote, "engine", costs=Costs(tmp_path / "costs.json"))
        drive(loader, library, speed=SPEED)
        loader.close()
        rate, trip = Costs(tmp_path / "costs.json").link(remote.url)
        assert 0.5e6 < rate < 1.5e6 and trip < 0.1


class TestLookUp:
    def test_local_and_remote_answer_alike(self, server, remote):
        local = open_store("memory://")
        for store in (local, remote):
            store.put("ac", "a" * 64, b"manifest")
            loader = make_loader(store)
            found = loader.look_up(["a" * 64, "b" * 64], tokens=100_000)
            assert found[0] == b"manifest" and isinstance(found[1], LookupError)
            loader.close()

    def test_all_are_asked_for_at_once(self, server, remote):
        server.link = Link(delay=0.1)
        loader = make_loader(remote)
        began = time.monotonic()
        found = loader.look_up([f"{i:064x}" for i in range(6)], tokens=100_000)
        assert all(isinstance(f, LookupError) for f in found) and time.monotonic() - began < 0.55
        loader.close()

    @pytest.mark.parametrize("kind", ["silent", "stall", "drip"])
    def test_a_network_that_does_not_answer_costs_little(self, server, remote, kind):
        server.objects["/ac/" + "a" * 64] = bytes(100)
        server.fault = lambda *request: Fault(kind)
        loader = make_loader(remote)
        began = time.monotonic()
        (found,) = loader.look_up(["a" * 64], tokens=1000)
        assert isinstance(found, Exception) and time.monotonic() - began < 1.5
        loader.close()

    def test_a_closed_store(self, remote):
        loader = make_loader(remote)
        remote.close()
        assert isinstance(loader.look_up(["a" * 64])[0], StoreUnavailableError)
        loader.close()
