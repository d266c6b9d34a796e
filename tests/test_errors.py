from __future__ import annotations

import builtins
import linecache
import os

import pytest
import torch

import net2gp as n2g
from net2gp import errors, memory
from net2gp.errors import (
    InputError,
    Net2GPError,
    NetworkError,
    TooLarge,
    check_dtype_and_device,
    check_finite,
    check_positive,
)
from net2gp.linalg.cholesky import cholesky
from net2gp.memory import available_memory, check_memory


def test_every_error_is_also_the_builtin_that_one_would_expect() -> None:
    builtin = {
        InputError: ValueError,
        NetworkError: ValueError,
        errors.NotPositiveDefinite: ArithmeticError,
        TooLarge: MemoryError,
        errors.FileFormatError: ValueError,
    }
    for error, base in builtin.items():
        assert issubclass(error, base)
        assert issubclass(error, Net2GPError)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_tensors_pass_even_where_their_sum_overflows(dtype: torch.dtype) -> None:
    check_finite(torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype), "x")
    check_finite(torch.zeros(0, 3, dtype=dtype), "x")


def test_what_cannot_be_infinite_passes() -> None:
    check_finite(torch.arange(3), "x")
    check_finite(torch.tensor([True]), "x")
    check_finite(torch.ones(3, device="meta"), "x")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(), (4,), (4, 2), (4, 2, 3)])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(bad: float, shape: tuple) -> None:
    for index in range(torch.Size(shape).numel()):
        x = torch.ones(shape)
        x.view(-1)[index] = bad
        row = index // torch.Size(shape[1:]).numel() if shape else 0
        message = (
            rf"x must be finite, but 1 of {x.numel()} values is NaN or .*\(first in row {row}\)"
        )
        with pytest.raises(InputError, match=message):
            check_finite(x, "x")


def test_infinities_of_both_signs_do_not_cancel() -> None:
    with pytest.raises(
        InputError, match=r"y must be finite, but 2 of 2 values are NaN .*y\.isfinite"
    ):
        check_finite(torch.tensor([float("inf"), -float("inf")]), "y")


@pytest.mark.parametrize("value", [1e-300, 1, 2.5, torch.tensor([1.0, 2.0])])
def test_positive_values_pass(value) -> None:
    check_positive(value, "noise_var")
    check_positive(value * 0, "noise_var", zero=True)


@pytest.mark.parametrize(
    ("value", "zero", "message"),
    [
        (
            0.0,
            False,
            r"noise_var must be positive and finite, but 0 was given\. Pass",
        ),
        (-1.0, False, r"must be positive and finite, but -1 was given"),
        (-1.0, True, r"must be zero or positive and finite, but -1 was given"),
        (float("inf"), True, r"but inf was given"),
        (float("nan"), False, r"but nan was given\. Pass for example noise_var=0\.1"),
        (torch.tensor([[1.0, -2.0]]), False, r"but -2 was given"),
    ],
)
def test_other_values_are_refused(value, zero: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_positive(value, "noise_var", zero=zero)


def test_dtypes_and_devices_must_agree() -> None:
    like = torch.ones(2)
    check_dtype_and_device(torch.ones(3), "x", like, "the network")
    check_dtype_and_device(torch.arange(3), "x", like, "the network")
    with pytest.raises(
        InputError, match=r"x is torch\.float64, but the network is torch\.float32\. Conv"
    ):
        check_dtype_and_device(torch.ones(3).double(), "x", like, "the network")
    with pytest.raises(
        InputError, match=r"x is on meta, but the network is on cpu\. Move it: x = x\.to"
    ):
        check_dtype_and_device(torch.ones(3, device="meta"), "x", like, "the network")


def test_what_fits_into_memory_is_allowed_and_what_does_not_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device="cpu": 3 * 2**30)
    device = torch.device("cpu")
    check_memory(3 * 2**30, device, "a matrix", "use less")
    message = r"a matrix would take 4\.5 GiB, but 3\.0 GiB are free on cpu\. Instead: use less\."
    with pytest.raises(TooLarge, match=message):
        check_memory(4.5 * 2**30, device, "a matrix", "use less")


def test_some_memory_is_available() -> None:
    assert 2**20 < available_memory() < 2**50


def test_a_system_without_a_report_of_free_memory_counts_all_of_it(monkeypatch) -> None:
    def refuse(*arguments, **keywords):
        raise OSError

    monkeypatch.setattr(builtins, "open", refuse)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory() == total
    monkeypatch.setattr(os, "sysconf", refuse)
    assert available_memory() == 2**63 - 1


VERSION_2 = {
    "/proc/self/cgroup": "0::/user/me\n",
    "/sys/fs/cgroup/user/me/memory.max": "5000\n",
    "/sys/fs/cgroup/user/me/memory.current": "3000\n",
    "/sys/fs/cgroup/user/me/memory.stat": "anon 100\ninactive_file 500\n",
}
VERSION_2_IN_A_CONTAINER = {
    "/proc/self/cgroup": "0::/outside\n",
    "/sys/fs/cgroup/memory.max": "5000\n",
    "/sys/fs/cgroup/memory.current": "3000\n",
    "/sys/fs/cgroup/memory.stat": "inactive_file 500\n",
}
VERSION_1 = {
    "/proc/self/cgroup": "3:cpu:/\n4:memory:/job:1\n0::/\n",
    "/sys/fs/cgroup/memory/job:1/memory.limit_in_bytes": "5000\n",
    "/sys/fs/cgroup/memory/job:1/memory.usage_in_bytes": "3000\n",
    "/sys/fs/cgroup/memory/job:1/memory.stat": "inactive_file 7\ntotal_inactive_file 500\n",
}


def reader(files: dict[str, str]):
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return read


@pytest.mark.parametrize("files", [VERSION_2, VERSION_2_IN_A_CONTAINER, VERSION_1])
def test_a_container_may_have_less_than_the_system(monkeypatch, files: dict[str, str]) -> None:
    """5000 bytes, of which 3000 are used and 500 of these can be given up."""
    monkeypatch.setattr(memory, "_read", reader(files))
    assert available_memory() == 2500


def test_a_container_without_a_limit_has_what_the_system_has(monkeypatch) -> None:
    files = {**VERSION_2, "/sys/fs/cgroup/user/me/memory.max": "max\n"}
    monkeypatch.setattr(memory, "_read", reader(files))
    monkeypatch.setattr(memory, "_system_memory", lambda: 12345)
    assert available_memory() == 12345


def test_warnings_point_at_the_line_that_called_net2gp() -> None:
    """However deep the warning arises, and whatever decorators are in between."""
    x = torch.ones(3, 1, dtype=torch.float64)
    data, kernel = (x, torch.zeros(3, 1, dtype=torch.float64)), n2g.RBF()
    network = torch.nn.Linear(1, 1).double().eval()
    calls = (
        lambda: errors.warn("net2gp", errors.JitterAdded),
        lambda: cholesky(torch.ones(3, 3, dtype=torch.float64)),
        lambda: n2g.condition(kernel, data, n2g.Gaussian(1e-20)),
        torch.no_grad()(lambda: n2g.condition(kernel, data, n2g.Gaussian(1e-20))),
        lambda: n2g.laplace(network, (x, 1000 + x), n2g.Gaussian(1e-6), prior_var=1.0),
    )
    for call in calls:
        with pytest.warns(errors.Net2GPWarning) as caught:
            call()
        for one in caught:
            assert one.filename == __file__
            assert "lambda" in linecache.getline(one.filename, one.lineno)
