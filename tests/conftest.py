"""Eight CPU devices for every test, so that sharding is tested wherever the tests run. The root conftest.py sets the rest."""

import os

_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

import hypothesis  # noqa: E402

# The same examples in every run of CI and of `make test`; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
