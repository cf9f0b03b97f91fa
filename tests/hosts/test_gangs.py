# SPDX-License-Identifier: Apache-2.0
"""The hosts that a mark asks for, and the errors of marks and options that make no sense."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import PlanError
from pytest_llenergy.hosts.launchers import HostOffer, Shape, choose_shape
from pytest_llenergy.options.values import cluster

from .two_hosts import TwoHosts


def offers(*devices: int) -> list[HostOffer]:
    return [HostOffer(f"n{number}", count) for number, count in enumerate(devices)]


@pytest.mark.parametrize(
    ("n", "per_host", "devices", "hosts", "share"),
    [
        (4, None, (4, 4), 1, 4),
        (8, None, (4, 4), 2, 4),
        (6, None, (4, 4), 2, 3),
        (4, None, (2, 3, 2), 2, 2),
        (4, 2, (4, 4), 2, 2),
        (4, 4, (2, 2), 1, 4),
        # There are none that can.
        (7, None, (4, 4), 1, 7),
        (2, None, (), 1, 2),
        # None has GPUs.
        (2, None, (0, 0), 1, 2),
    ],
)
def test_as_few_hosts_as_can_hold_equal_shares(
    n: int, per_host: int | None, devices: tuple[int, ...], hosts: int, share: int
) -> None:
    assert choose_shape(GpuRequest(n, per_host=per_host), offers(*devices)) == Shape(hosts, share)


UNLIKE = """
import os
import pytest

def where():
    return os.environ["CUDA_VISIBLE_DEVICES"]

@pytest.mark.gpus(2)
def test_one_host(workers):
    assert workers.run(where) == ["GPU-n1-0", "GPU-n1-1"]

@pytest.mark.gpus(2, per_host=1)
def test_two_hosts(workers):
    assert workers.run(where) == ["GPU-n1-0", "GPU-n2-0"]

@pytest.mark.gpus(2)
def test_one_host_again(workers):
    assert workers.run(where) == ["GPU-n1-0", "GPU-n1-1"]
"""


@pytest.mark.slow
def test_marks_that_mean_other_hosts_do_not_share_ranks(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(UNLIKE)
    assert "3 passed" in output, output


@pytest.mark.parametrize(
    ("per_host", "message"),
    [
        (0, "per_host is 0, needs a whole number, 1 or more"),
        (True, "per_host is True, needs a whole number, 1 or more"),
        ("8", "per_host is '8', needs a whole number, 1 or more"),
        (3, "per_host=3 does not divide n=4: all hosts get equal shares"),
    ],
)
def test_a_wrong_share_is_refused(per_host: object, message: str) -> None:
    with pytest.raises(PlanError) as error:
        GpuRequest(4, per_host=per_host)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_several_hosts_are_a_reason_to_skip_on_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpus(16, per_host=8)
        def test_it(workers):
            workers.run(print)
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED*gpus(16, per_host=8) needs 2 hosts: run with --energy-cluster, and work in ranks *"]
    )


@pytest.mark.parametrize(
    "value", ["ray", "ray:head:6379", "ray:10.0.0.1:6379", "ray:[::1]:6379", "ray:[fd00::2]:6379", "slurm"]
)
def test_the_names_of_clusters(value: str) -> None:
    assert cluster(value) == value


@pytest.mark.parametrize(
    "value", ["ray:::1:6379", "ray:[head]:6379", "ray:[::1]", "ray://head:10001", "ray:"]
)
def test_names_that_are_not_those_of_clusters(value: str) -> None:
    with pytest.raises(ValueError, match="needs local, slurm, ray or ray:HOST:PORT"):
        cluster(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--energy-cluster=pbs"], "--energy-cluster=pbs: needs local, slurm, ray or ray:HOST:PORT"),
        (
            ["--energy-cluster=ray:host"],
            "--energy-cluster=ray:host: needs local, slurm, ray or ray:HOST:PORT",
        ),
        (
            ["--energy-cluster=slurm"],
            "SLURM_JOB_ID is not set; run this inside a Slurm job, such as ",
        ),
        (
            ["--energy-cluster=slurm", "--energy-gpus=0"],
            "names GPUs of this host; leave it out with a cluster",
        ),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    pytester.makepyfile("def test_it(energy): energy(print)")
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}*"])
