"""How much is tried: little in the fast suite, more in the thorough one. Read where a test is declared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

Test = TypeVar("Test", bound=Callable[..., Any])


def budget(fast: int, thorough: int) -> int:
    """How much the suite that runs tries. What is no test of hypothesis says so with `pytest.mark.budget`."""
    return thorough if "KVFLOW_THOROUGH" in os.environ else fast


def examples(fast: int, thorough: int, **others: Any) -> Callable[[Test], Test]:
    """A property's examples in the fast suite and in the thorough one, and other settings of hypothesis."""
    decorate: Callable[[Test], Test] = settings(max_examples=budget(fast, thorough), **others)
    return decorate


def machine_test(machine: type[RuleBasedStateMachine], fast: int, thorough: int, *, steps: int) -> type[Any]:
    """The test of a state machine of hypothesis."""
    machine.TestCase.settings = settings(max_examples=budget(fast, thorough), stateful_step_count=steps)
    return machine.TestCase
