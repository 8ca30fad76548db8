"""The number of examples that a test tries: few in the fast suite, more in the thorough suite."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

Test = TypeVar("Test", bound=Callable[..., Any])


def budget(fast: int, thorough: int) -> int:
    """Return `thorough` in the thorough suite, else `fast`. Tests without hypothesis have the mark `budget`."""
    return thorough if "KVFLOW_THOROUGH" in os.environ else fast


def examples(fast: int, thorough: int, **others: Any) -> Callable[[Test], Test]:
    """Set a property's number of examples in the fast and the thorough suite, and other settings of hypothesis."""
    decorate: Callable[[Test], Test] = settings(max_examples=budget(fast, thorough), **others)
    return decorate


def machine_test(machine: type[RuleBasedStateMachine], fast: int, thorough: int, *, steps: int) -> type[Any]:
    """Return the test of a hypothesis state machine, with its number of examples in each suite and of steps."""
    machine.TestCase.settings = settings(max_examples=budget(fast, thorough), stateful_step_count=steps)
    return machine.TestCase
