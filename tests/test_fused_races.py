"""The protocol of the fused all-reduce under a thread sanitizer: ranks are threads, nothing is read or replaced early.

Needs a C++ compiler with a thread sanitizer, not the package's own build.
"""

import os
import subprocess

import pytest
from native_build import SOURCES, build, require_flags

SANITIZED = ("-O1", "-g1", "-fsanitize=thread")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    require_flags(*SANITIZED)
    jobs = {SOURCES / "tests" / "ranks_driver.cpp": ("-DFC_FUSED_DEBUG", "-ffp-contract=off", "-Wno-unknown-pragmas")}
    return build(tmp_path_factory.mktemp("ranks"), "ranks_driver", jobs, *SANITIZED)


def test_ranks_do_not_race(driver):
    ran = subprocess.run([driver], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stdout + ran.stderr[-3000:]


def test_without_protection_they_do(driver):
    stop_at_the_first = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    ran = subprocess.run([driver, "unprotected"], capture_output=True, text=True, check=False, env=stop_at_the_first)
    assert "WARNING: ThreadSanitizer: data race" in ran.stderr
    assert ran.returncode != 0
