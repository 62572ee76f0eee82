"""The base of all settings, and `RetryOptions`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from eventpump.errors import ConfigurationError
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.consumer import HostSettings
from tests.unit.options.given import FULL, assert_clean


def test_retry_options_default_to_those_of_their_option() -> None:
    """Without a word on the limit, links and handlers are retried without one; sends have the default of the class."""
    settings = HostSettings(hub="h", link_retry=RetryOptions(base_delay=1.0), handler_retry=RetryOptions(max_retries=5))
    assert settings.link_retry == RetryOptions(max_retries=None, base_delay=1.0, max_delay=30.0)
    assert settings.handler_retry == RetryOptions(max_retries=5, base_delay=0.5, max_delay=30.0)
    assert HostSettings(hub="h", link_retry=RetryOptions(max_retries=3)).link_retry.max_retries == 3
    assert RetryOptions().max_retries == 3
    slow = HostSettings(hub="h", link_retry=RetryOptions(base_delay=40.0)).link_retry
    assert slow == RetryOptions(max_retries=None, base_delay=40.0, max_delay=40.0)
    with pytest.raises(ConfigurationError, match=r"link_retry: max_delay must not be below base_delay"):
        HostSettings.model_validate({"hub": "h", "link_retry": {"base_delay": 40.0, "max_delay": 30.0}})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_retries": 101}, "max_retries"),
        ({"base_delay": 0}, "base_delay"),
        ({"max_delay": 0.5}, "max_delay"),
        ({"max_delya": 5}, "max_delya"),
    ],
)
def test_retry_options_with_a_bad_value_are_refused(options: dict[str, Any], field: str) -> None:
    """Retry options are checked as the settings are, unknown names included."""
    with pytest.raises(ConfigurationError) as caught:
        RetryOptions(**options)
    assert_clean(caught.value, field)


def test_settings_with_a_missing_field_name_it() -> None:
    """Settings made by hand say what is missing."""
    with pytest.raises(ConfigurationError, match="fully_qualified_namespace: is required"):
        ConnectionSettings.model_validate({})


def test_settings_are_frozen() -> None:
    """Settings do not change."""
    with pytest.raises(ValidationError):
        connection_settings(FULL).port = 1  # what is tested is that this fails
