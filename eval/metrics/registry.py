"""The metrics of a sample. Each one is a registered function.

    @register_metric("first_token", "first token", mean="share")
    def first_token(hits: Sequence[bool]) -> bool:
        return hits[0]

The parameters name what the function looks at (`INPUTS`). A metric is computed when a sample is measured and is kept
with its result; from there it goes into the summary, with an interval, and into the tables of every report. A metric
that looks at nothing but what results keep is also computed for results that were written before it was registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import inf, isnan
from typing import Any, Literal, TypeVar

from hf_axonn_eval.data.results import LOGPROB_ROUNDING, MEASURED, SampleResult


F = TypeVar("F", bound=Callable[..., object])
Mean = Literal["share", "number"]
ShownIn = Literal["terminal", "report", "summary"]

# Token ids of the sample; the ids that end a text for the model, and the text of the continuation before the first of
# them; the log-probability of the continuation; and fields of the result.
INPUTS = ("prefix", "suffix", "eos", "text_to_eos", "generated_logprob", *MEASURED)
_RESULT_FIELDS = frozenset(field.name for field in fields(SampleResult))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A registered metric; the arguments are those of `register_metric`, and the `inputs` that the function takes."""

    name: str
    title: str
    mean: Mean
    shown_in: ShownIn
    inputs: tuple[str, ...]
    function: Callable[..., Any]
    least: float = -inf
    most: float = inf

    def __call__(self, measured: Mapping[str, Any]) -> float | bool | None:
        """The metric of one sample; None if one of its inputs was not measured, or it is not defined.

        Args:
            measured: INPUTS by name; those that are None or not there were not measured.
        Raises:
            ValueError: the function gives NaN, a number below `least` or above `most` by more than rounding, or for a
                share something that is neither yes nor no.
        """
        given = {name: measured.get(name) for name in self.inputs}
        if any(value is None for value in given.values()):
            return None
        value = self.function(**given)
        if value is None:
            return None
        number = float(value)
        if self.mean == "share" and number not in (0, 1):
            raise ValueError(
                f"metric {self.name!r} is a share, so it must be True or False for a sample, not {value!r}."
            )
        if isnan(number):
            raise ValueError(f"metric {self.name!r} is NaN; return None for a sample that does not have it.")
        if not self.least - LOGPROB_ROUNDING <= number <= self.most + LOGPROB_ROUNDING:
            raise ValueError(
                f"metric {self.name!r} is {number!r}, not from {self.least:g} to {self.most:g} as registered."
            )
        if self.mean == "share":
            return bool(number)
        return value if type(value) is int else number


METRICS: dict[str, Metric] = {}  # by name, in the order of the tables


def register_metric(
    name: str,
    title: str,
    *,
    mean: Mean = "number",
    shown_in: ShownIn = "terminal",
    least: float = -inf,
    most: float = inf,
) -> Callable[[F], F]:
    """Register the decorated function as a metric. The function itself stays as it is.

    Parameters without a default are inputs and must be named as in INPUTS. A sample that lacks one of them does not
    have the metric, and neither has one for which the function returns None; neither enters the mean.

    Args:
        name: in results, summaries and logs.
        title: in tables.
        mean: what the mean over samples is: a "share", where the function says yes or no (an exact interval, McNemar's
            test), or the mean of a "number" (Student's t over documents).
        shown_in: "terminal", all tables; "report", those of the Markdown and HTML report; "summary", no table, only
            summary.json.
        least: no value is smaller; intervals are cut there.
        most: no value is larger.
    Raises:
        ValueError: an unknown `mean` or `shown_in`, a name that is taken, or a parameter that is no input.
    """
    if mean not in ("share", "number") or shown_in not in ("terminal", "report", "summary"):
        raise ValueError(
            f"mean is {mean!r} and shown_in {shown_in!r}, but they must be 'share' or 'number', and 'terminal', "
            "'report' or 'summary'."
        )

    def register(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        inputs = tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)
        unknown = [parameter for parameter in inputs if parameter not in INPUTS]
        if unknown:
            raise ValueError(f"metric {name!r} asks for {', '.join(unknown)}; there are {', '.join(INPUTS)}.")
        ours = function.__module__.startswith("hf_axonn_eval.")
        # a notebook registers the function of a cell again
        again = name in METRICS and _place(METRICS[name].function) == _place(function)
        if not again and (name in METRICS or (name in _RESULT_FIELDS and not ours)):
            raise ValueError(f"the name {name!r} is taken: name the metric otherwise.")
        METRICS[name] = Metric(
            name=name,
            title=title,
            mean=mean,
            shown_in=shown_in,
            inputs=inputs,
            function=function,
            least=least,
            most=most,
        )
        return function

    return register


def value(result: SampleResult, name: str) -> float | bool | None:
    """A metric of one sample, None where it was not measured or is not defined.

    Results of before the metric was registered do not hold it; it is computed from what they hold.
    """
    stored = result.metric(name)
    return METRICS[name](vars(result)) if stored is None and name in METRICS else stored


def _place(function: Callable[..., object]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
