"""One rank compiles and the others load what it made: with caches of their own, as on different hosts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

import paceline
from paceline import DDP, _torch, errors, settings
from paceline.compiler import agreement
from paceline.compiler.consensus import shared_compile
from paceline.compiler.consensus.compile_exchange import CompileExchange, NoteKind, exchange_of
from paceline.compiler.consensus.shared_compile import COMPILED, LOADED, Artifacts, Kernel, SharedCompile
from paceline.control import wire
from paceline.testing import RankPool
from tests.compiler._compare import batch, new_salt, same_grads, stack
from tests.compiler._models import Salted
from tests.compiler.conftest import TIMEOUT_S, WARNINGS
from tests.on_ranks import on_ranks


@contextlib.contextmanager
def _own_cache(folder, rank):
    """A cache that is empty, and no other rank's."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / str(rank))}):
        yield


class _Seen(contextlib.ExitStack):
    """What Inductor does with the C++ compiler meanwhile."""

    def __init__(self):
        super().__init__()
        self.built, self.tried, self.waits = [], [], []
        self._watch(cpp_builder.CppBuilder, "build", lambda builder: self.built.append(builder._name))
        self._watch(cpu_vec_isa.VecISA, "check_build", lambda isa, code: self.tried.append((str(isa), _on_main())))
        # How many graphs it had by then.
        self._watch(AsyncCompile, "wait", lambda *_: self.waits.append(counters["inductor"]["fxgraph_cache_miss"]))

    def _watch(self, owner, name, note):
        real = getattr(owner, name)

        def watched(*args):
            note(*args)
            return real(*args)

        self.enter_context(mock.patch.object(owner, name, watched))


def _on_main():
    return threading.current_thread() is threading.main_thread()


def _once(rank, size, folder, salt):
    # Ranks may have made other numbers of wrappers.
    alone, _ = dist.new_subgroups(group_size=1)
    others = [DDP(stack(1), process_group=alone) for _ in range(rank)]
    with _own_cache(folder, rank), _Seen() as seen:
        torchs = cpu_vec_isa.valid_vec_isa_list, AsyncCompile.wait
        # With several buckets, as one alone is not reported.
        eager, ddp = (DDP(Salted(salt), bucket_cap_mb=600 / 2**20) for _ in range(2))
        compiled = paceline.compile(ddp, once=True)
        for model in (eager, compiled):
            model(batch(rank)).square().sum().backward()
        same_grads(eager, ddp)
        [found] = compiled.forward._agreement.compilations
        others.clear()
        assert len(_torch.kernel_files()) > 0
        assert (cpu_vec_isa.valid_vec_isa_list, AsyncCompile.wait) == torchs
        with _torch.trials_on_demand():
            picked = str(cpu_vec_isa.pick_vec_isa())
    assert len(seen.built) > 0 if rank == 0 else seen.built == []
    # Only sets that stand before the one in use were tried. The rank that compiles tried them in another thread.
    sets = list(dict.fromkeys(name for name, _ in seen.tried))
    assert sets[-1:] == [picked]
    assert sets == [str(isa) for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in sets]
    assert seen.tried[0][1] == (rank != 0)
    # Kernels of the forward are not waited for before the backward is compiled.
    assert set(seen.waits) == ({2} if rank == 0 else {0})
    same = rank != 0 or _picks() == _picks(_torch.trials_on_demand)
    return found.source, counters["inductor"]["fxgraph_cache_miss"], same


def _picks(context=contextlib.nullcontext):
    """Which instructions Inductor would use, by what it is told about their width."""
    with context():
        found = {}
        for width in (None, 512, 256, 128):
            with torch._inductor.config.patch({"cpp.simdlen": width}):
                found[width] = str(cpu_vec_isa.pick_vec_isa())
        return found


def test_one_rank_compiles_and_the_others_load_it(job_directory, tmp_path):
    # Kernels that were compiled before would need no file.
    salt = new_salt()
    # Ranks of its own: those of the pool may have loaded some of the kernels before, and look for no file.
    with RankPool() as pool:
        found = pool.run(_once, str(tmp_path), salt, timeout=TIMEOUT_S, allow_warnings=WARNINGS)
    assert found == [(COMPILED, 2, True), (LOADED, 0, True)]
    # Inductor locks a kernel to compile it, and to look whether it is compiled: the other rank did neither.
    for rank in range(2):
        kernels = {path.name.partition(".")[0] for path in (tmp_path / str(rank)).rglob("*.main.so")}
        locks = {path.stem for path in (tmp_path / str(rank)).glob("locks/*")}
        assert kernels
        assert kernels & locks == (kernels if rank == 0 else set())


def _cannot(rank, size, folder):
    scale = 3.5 + rank

    def constant(x):
        return (x * scale).sum()

    def plain(x):
        return x.sum()

    # Where nobody writes kernels, nothing is made ready for them.
    unused = mock.patch.object(_torch, "trials_on_demand", side_effect=AssertionError)
    with _own_cache(folder, rank), agreement(True, once=True) as agreed, unused:
        torch.compile(constant, backend="aot_eager")(torch.ones(3))
        torch.compile(plain, backend="eager")(torch.ones(3))
        # There is one machine here; the version is what can be different on it.
        version = torch.__version__
        torch.__version__ = f"{version}-of-rank-{rank}"
        try:
            torch.compile(lambda x: x.prod(), backend="aot_eager")(torch.ones(3))
        finally:
            torch.__version__ = version
    return [compilation.source for compilation in agreed.compilations]


def test_if_ranks_cannot_share_each_compiles_and_the_reason_is_kept(ranks, tmp_path):
    for constant, plain, version in ranks(_cannot, str(tmp_path)):
        assert constant == f"{COMPILED}: the graph of rank 1 is not that of rank 0"
        assert plain == f"{COMPILED}: the backend leaves no artifacts"
        assert version.startswith(f"{COMPILED}: the version of torch of rank 1 is not that of rank 0")


def _tampered(rank, size, folder):
    broadcast = CompileExchange.broadcast

    def tamper(self, data, **options):
        received = broadcast(self, data, **options)
        return received[:-1] + bytes([received[-1] ^ 1]) if rank == 1 else received

    with (
        mock.patch.object(CompileExchange, "broadcast", tamper),
        mock.patch.object(torch.compiler, "load_cache_artifacts") as load,
        _own_cache(folder, rank),
        agreement(True, once=True),
    ):
        expected = (errors.PeerFailedError, errors.DisagreementError)[rank]
        with pytest.raises(expected, match="not those that rank 0 announced"):
            # This does without a C++ compiler, which is not what the test is about.
            torch.compile(lambda x: x.sin(), options={"fallback_by_default": True})(torch.ones(3))
    load.assert_not_called()
    dist.barrier()


@pytest.mark.full
def test_bytes_that_rank_0_did_not_announce_are_not_loaded(ranks, tmp_path):
    ranks(_tampered, str(tmp_path))


class _Boom:
    """An object whose pickle runs code where it is loaded: it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def _forged(rank, size, folder):
    """Somebody who can write to the store and to the connection puts a program of his in the place of rank 0's."""
    trap = Path(folder) / "loaded"
    payload = Artifacts(pickle.dumps(_Boom(str(trap))), {}).encode()
    broadcast = CompileExchange.broadcast

    def forge(self, data, **options):
        broadcast(self, data, **options)
        # He knows the place, but not the secret.
        key, word = "artifacts/1", (hashlib.sha256(payload).hexdigest(),)
        with mock.patch.dict(os.environ):
            del os.environ[settings.SECRET]
            place = f"{self._board.name}/{key}"
            self._board.set(key, wire.encode(wire.MessageKind.WORD, word, place=place))
        return payload

    # The bytes that torch gets from a verified message are pickles in an envelope of its own.
    with (
        mock.patch.object(CompileExchange, "broadcast", forge if rank else broadcast),
        mock.patch.object(torch.compiler, "load_cache_artifacts", pickle.loads),
        _own_cache(folder, rank),
        agreement(True, once=True),
    ):
        expected = (errors.PeerFailedError, errors.DisagreementError)[rank]
        with pytest.raises(expected, match="not those that rank 0 announced"):
            torch.compile(lambda x: x.sin(), options={"fallback_by_default": True})(torch.ones(3))
    assert not trap.exists()
    dist.barrier()
    # The trap works: this is what would have happened.
    pickle.loads(Artifacts.decode(payload).cache).close()
    assert trap.exists()


def test_artifacts_that_were_forged_in_the_store_are_not_unpickled(ranks, tmp_path):
    ranks(_forged, str(tmp_path))


def _without_secret(rank, size):
    del os.environ[settings.SECRET]
    torch._dynamo.reset()
    install = mock.patch.object(shared_compile, "_install", side_effect=AssertionError)
    warn = mock.patch.object(shared_compile.logger, "warning")
    with install, warn as warned, agreement(True, once=True) as agreed:
        for function in (lambda x: x.sum(), lambda x: x.prod()):
            torch.compile(function, backend="aot_eager")(torch.ones(3))
    for compilation in agreed.compilations:
        assert compilation.source == f"{COMPILED}: {shared_compile.NO_SECRET}"
    return warned.call_count


def test_without_a_secret_each_rank_compiles_and_one_says_so_once(ranks):
    assert ranks(_without_secret) == [1, 0]


NAME = "ab/cabc0123456789.main.so"


@pytest.fixture
def kernel_folder(tmp_path):
    tmp_path.chmod(0o700)
    with (
        mock.patch.object(_torch, "kernel_folder", return_value=str(tmp_path)),
        mock.patch.object(_torch, "adopt_kernel") as adopt,
        mock.patch.object(torch.compiler, "load_cache_artifacts") as load,
    ):
        yield tmp_path, adopt, load


@pytest.mark.parametrize("what", ["other bytes", "a link", "writable", "of another user"])
def test_a_kernel_that_was_planted_is_replaced_before_it_is_loaded(kernel_folder, what):
    folder, adopt, _ = kernel_folder
    path = folder / NAME
    path.parent.mkdir(mode=0o700)
    planted = folder / "planted"
    planted.write_bytes(b"a program of somebody else" if what == "other bytes" else b"verified")
    if what == "a link":
        path.symlink_to(planted)
    else:
        path.hardlink_to(planted)
    if what == "writable":
        planted.chmod(0o666)
    if what == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can make a file of another user")
        os.chown(planted, 65534, 65534)
    before = planted.read_bytes()
    assert shared_compile._install(Artifacts(b"", {NAME: Kernel("ctypes", b"verified")})) == ""
    # Whoever holds the planted file holds another one now.
    planted.write_bytes(b"changed later")
    assert path.read_bytes() == b"verified", before
    adopt.assert_called_once_with(NAME, "ctypes")


def test_a_kernel_that_is_there_already_stays(kernel_folder):
    folder, *_ = kernel_folder
    artifacts = Artifacts(b"", {NAME: Kernel("ctypes", b"verified")})
    shared_compile._install(artifacts)
    before = (folder / NAME).stat()
    shared_compile._install(artifacts)
    assert (folder / NAME).stat().st_ino == before.st_ino


def test_a_folder_that_torch_has_made_for_all_is_closed_to_others(kernel_folder):
    """Torch makes its folders below the cache directory with the user's umask."""
    folder, adopt, _ = kernel_folder
    (folder / "ab").mkdir()
    (folder / "ab").chmod(0o775)
    assert shared_compile._install(Artifacts(b"", {NAME: Kernel("ctypes", b"verified")})) == ""
    assert (folder / "ab").stat().st_mode & 0o777 == 0o755
    adopt.assert_called_once_with(NAME, "ctypes")


def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(kernel_folder):
    folder, adopt, load = kernel_folder
    folder.chmod(0o777)
    why = shared_compile._install(Artifacts(b"", {NAME: Kernel("ctypes", b"verified")}))
    assert why.startswith(f"another user can write to {folder}, ")
    adopt.assert_not_called()
    load.assert_not_called()
    assert not (folder / NAME).exists()


def _open_folder(rank, size, folder):
    Path(folder).chmod(0o700)
    with _own_cache(folder, rank), mock.patch.object(torch.compiler, "load_cache_artifacts") as load:
        os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"], exist_ok=True)
        if rank == 1:
            Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).chmod(0o777)
        with agreement(True, once=True) as agreed:
            found = torch.compile(lambda x: x.sin(), options={"fallback_by_default": True})(torch.ones(3))
    torch.testing.assert_close(found, torch.ones(3).sin())
    load.assert_not_called()
    return [compilation.source for compilation in agreed.compilations]


def test_a_rank_whose_folder_is_open_compiles_by_itself(ranks, tmp_path):
    [led], [followed] = ranks(_open_folder, str(tmp_path))
    assert led == COMPILED
    assert followed.startswith(f"{COMPILED}: another user can write to {tmp_path}")


@on_ranks()
def test_if_the_rank_that_compiles_fails_all_do(rank, size):
    def backend(gm, example_inputs):
        raise RuntimeError(f"no such instruction on rank {rank}")

    torch._dynamo.reset()
    expected = (torch._dynamo.exc.BackendCompilerFailed, errors.PeerFailedError)[rank]
    with agreement(True, once=True), pytest.raises(expected, match=r"no such instruction on rank 0|rank 0 raised"):
        torch.compile(lambda x: x.sum(), backend=backend)(torch.ones(3))


def _all_hear(rank, size, folder, what):
    """What goes wrong on rank 0 is told to the others, which wait to hear how it went."""
    build = cpp_builder.CppBuilder.build

    def refuse(builder):
        if builder._name.endswith(".main"):
            raise OSError("no space left for kernels")
        return build(builder)

    # Each with a number that no other kernel has: the process keeps those it has built.
    patch, said, salt = {
        "reading": (mock.patch.object(_torch, "kernel_folder", side_effect=OSError("no such folder")), "folder", 1.25),
        "building": (mock.patch.object(cpp_builder.CppBuilder, "build", refuse), "no space left", 2.125),
    }[what]
    with _own_cache(folder, rank), patch:
        expected, match = ((Exception, said), (errors.PeerFailedError, "rank 0 raised"))[rank]
        with agreement(True, once=True), pytest.raises(expected, match=match):
            torch.compile(lambda x: x.cos() + salt, backend="inductor")(torch.ones(3))
    dist.barrier()


@pytest.mark.parametrize("what", [pytest.param("reading", marks=pytest.mark.full), "building"])
def test_if_artifacts_cannot_be_made_all_ranks_hear_of_it(ranks, tmp_path, what):
    ranks(_all_hear, str(tmp_path), what)


def test_headers_are_made_with_the_settings_of_the_compilation_and_keep_no_failure():
    seen, begun, end = [], threading.Event(), threading.Event()

    def make(*args, **options):
        seen.append(inductor_config.cpp.vec_isa_ok)
        begun.set()
        end.wait()

    def fail():
        begun.wait()
        raise ZeroDivisionError

    with (
        mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding_async", make),
        inductor_config.patch({"cpp.vec_isa_ok": "as set here"}),
    ):
        with pytest.raises(ZeroDivisionError), shared_compile._preparations_beside():
            fail()
        # They are still being made.
        end.set()
    assert seen == ["as set here"]


def _vanished(rank, size, folder):
    made = {"aa/aaaaaaaaaaaaa.main.so": "ctypes", "bb/bbbbbbbbbbbbb.main.so": "ctypes"}
    path = Path(folder) / "bb/bbbbbbbbbbbbb.main.so"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"kernel")
    once = SharedCompile(exchange_of(dist.group.WORLD))
    with mock.patch.multiple(_torch, kernel_folder=lambda: folder, kernel_files=lambda: made):
        assert once._new_kernels() == {path.relative_to(folder).as_posix(): Kernel("ctypes", b"kernel")}
        assert once._new_kernels() == {}
    doing = "the comparison of kinds"
    kind = (NoteKind.OFFER, NoteKind.GRAPH)[rank]
    with pytest.raises(errors.DisagreementError, match=r"out of step in .*'OFFER', 'GRAPH'"):
        once._exchange.gather_alike(kind, doing=doing)


def test_a_kernel_that_has_vanished_is_not_sent_and_notes_of_another_kind_are_refused(ranks, tmp_path):
    ranks(_vanished, str(tmp_path))


def test_a_build_for_an_accelerator_runs_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's wheels with CUDA run on machines without a GPU. To ask a driver there would end the compilation."""

    def of_the_build(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_the_build)
    assert shared_compile.environment()["accelerator"] == "none"
