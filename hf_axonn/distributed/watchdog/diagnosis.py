"""Diagnosis of a run that stands still: from the ranks' accounts a verdict, from it one message. No communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from hf_axonn.distributed.watchdog.crashes import Crash
from hf_axonn.distributed.watchdog.progress import Account, is_waiting_file


REPORTED = 8  # ranks are named one by one, more are counted
QUIET = 0.05  # of the time, and half a second: a process that uses no more of the processor receives no data
EVERY_RANK = "Every rank has to make the same calls in the same order, also where `if is_main_process` keeps one out."


def ranks_in_words(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 1 and 5; ranks 0, 1 ... and 12 more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > REPORTED:
        return f"ranks {', '.join(map(str, ranks[:REPORTED]))} and {len(ranks) - REPORTED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class Verdict(Enum):
    """The state of a run whose ranks all answer."""

    HANGING = "some are not where the others wait for them"
    APART = "each waits for others"
    BROKEN = "a connection broke, and none knows why"
    MOVING = "the run only takes long"


def judge(accounts: Sequence[Account], *, limit: float, broken: bool, blocking: bool) -> tuple[Verdict, list[Account]]:
    """Find which of the ranks that answered hold the others up: the verdict, and those to blame if it is HANGING.

    All ranks of a stage run one program, so the one that has issued the fewest collectives is missing in the next
    one. Where that does not tell them apart, it is the one that does not wait for others. Arguments: see `diagnose`.
    """
    if _wait_apart(accounts):
        return Verdict.APART, []
    behind = _behind(accounts)
    if len(behind) == len(accounts) and not any(account.waiting for account in accounts):
        if broken:
            return Verdict.BROKEN, []
        stand = not blocking and all(account.still >= limit for account in accounts)
        return Verdict.APART if stand else Verdict.MOVING, []
    busy = [account for account in behind if not account.waiting] or behind
    if len(busy) == len(accounts):
        return Verdict.APART, []
    patient = all(account.patient for account in accounts if account not in busy)
    if not broken and patient and any(account.idle < limit for account in busy):
        return Verdict.MOVING, []
    return Verdict.HANGING, busy


def diagnose(
    accounts: Sequence[Account],
    silent: Mapping[int, str],
    ended: Mapping[int, str],
    *,
    limit: float,
    broken: bool,
    blocking: bool = True,
    crashes: Mapping[int, Crash] | None = None,
) -> str | None:
    """Explain which ranks hold the others up: those that are gone, or else those that `judge` finds.

    Args:
        accounts: of the ranks that answered.
        silent: places of ranks that did not answer, by rank.
        ended: when ranks ended their script, by rank; they are not among the silent ones.
        limit: a rank that has done nothing for fewer seconds is at work.
        broken: whether a connection broke, or somebody only waited.
        blocking: whether a rank that waits for a collective stands in it, as on gloo. NCCL's return at once, and
            the main thread stands wherever it next needs a value.
        crashes: what ended silent ranks, as far as it is known.
    Returns:
        The message, or None if the run only takes long: the others wait without a limit for one that is at work, or
        nobody waits for anybody.
    """
    if known := {rank: crash for rank, crash in (crashes or {}).items() if rank in silent}:
        return _explain_crash(known, silent, accounts)
    if silent:
        return _explain_silence(silent, accounts)
    if ended:
        return _explain_end(ended, accounts)
    verdict, busy = judge(accounts, limit=limit, broken=broken, blocking=blocking)
    match verdict:
        case Verdict.HANGING:
            return _explain_hang(busy, accounts, limit)
        case Verdict.APART:
            return _explain_disagreement(accounts, max(account.still for account in accounts))
        case Verdict.BROKEN:
            return f"a connection between ranks broke {_step(accounts)}, and no rank knows why."
    return None


def diagnose_early(accounts: Sequence[Account], *, still: float) -> str | None:
    """Find ranks that wait for each other in different calls, long before the timeout: nothing will part them.

    On gloo only, where a rank that waits stands in the call.

    Args:
        accounts: of all ranks.
        still: seconds for which each has stood, without data that arrive.
    Returns:
        The message, or None if anything may still move: a rank works, is new in its place or receives data, or all
        wait in the same call.
    """
    stand = all(each.still >= still and each.used < QUIET * each.still + 0.5 for each in accounts)
    if not (stand and _wait_apart(accounts)):
        return None
    return _explain_disagreement(accounts, min(each.still for each in accounts))


def _step(accounts: Sequence[Account]) -> str:
    """Return the step of the rank that is furthest, in words."""
    return max(accounts, key=lambda account: account.done).when if accounts else "at an unknown step"


def _wait_apart(accounts: Sequence[Account]) -> bool:
    """Return whether all ranks wait, and not in the same call of the user's program, or some in a barrier alone."""
    calls, patient = {each.call for each in accounts}, {each.patient for each in accounts}
    return all(each.waiting for each in accounts) and ("" not in calls and len(calls) > 1 or len(patient) > 1)


def _explain_crash(crashes: Mapping[int, Crash], places: Mapping[int, str], accounts: Sequence[Account]) -> str:
    """Return what ended ranks that have left a trace, and the calls in which all ranks are."""
    first, when = min(crashes), _step(accounts)
    crash, lines = crashes[first], _lines(accounts, crashes)
    who = f"{ranks_in_words(sorted(crashes))} ({'; '.join(places[rank] for rank in sorted(crashes)[:REPORTED])})"
    if crash.reason != "Aborted" or not crash.waiting:
        stack = "\n".join(f"    {line}" for line in crash.stack)
        return f"{who} died {when}: {crash.reason}. The ranks are at\n{lines}\nWhere rank {first} was:\n{stack}"
    calls = {each.call for each in accounts} | {each.call for each in crashes.values()}
    apart = "the ranks are in different calls" if len(calls) > 1 else "their tensors differ in size"
    return (
        f"{who} died {when}: gloo aborts a process that receives another number of bytes than it waits for, and "
        f"{apart}.\n{lines}\n{EVERY_RANK}"
    )


def _explain_silence(places: Mapping[int, str], accounts: Sequence[Account]) -> str:
    """Return which ranks do not answer, and where the others wait for them."""
    others = (
        f"{_ranks(accounts)} waited for it{_calls(accounts)}{_passes(accounts)}" if accounts else "nobody else answers"
    )
    return (
        f"{ranks_in_words(sorted(places))} ({'; '.join(places[rank] for rank in sorted(places)[:REPORTED])}) died or "
        f"froze {_step(accounts)}: no answer (killed, out of memory, or the machine is down); {others}."
    )


def _explain_end(ended: Mapping[int, str], accounts: Sequence[Account]) -> str:
    """Return which ranks left their script while the others wait."""
    who = "; ".join(f"rank {rank} {at}" for rank, at in sorted(ended.items())[:REPORTED])
    who += f" and {len(ended) - REPORTED} more" if len(ended) > REPORTED else ""
    return (
        f"ended before the others, which are {_step(accounts)}: {who}. {_lone_call(accounts)}All ranks must make the "
        "same number of steps and leave a script at the same place."
    )


def _explain_hang(busy: Sequence[Account], accounts: Sequence[Account], limit: float) -> str:
    """Return what the first of the ranks to blame does while the others wait, and its stack."""
    first, waiting = busy[0], [account for account in accounts if account not in busy]
    if first.waiting:
        doing = "waits elsewhere than the others"
    elif first.idle >= limit:
        doing = "goes no further, or does something else"
    else:
        doing = (
            f"works {f'({first.work}) ' if first.work else ''}for longer than the timeout of the process group allows "
            "(ddp_timeout, InitProcessGroupKwargs; `accelerator.wait_for_everyone()` waits without a limit)"
        )
    waited = max(account.still for account in accounts)
    stack = "\n".join(f"    {line}" for line in first.stack)
    return (
        f"{_ranks(busy)} ({first.place}) hangs {first.when}{first.passing and f', {first.passing}'}: it "
        f"{doing}, while {_ranks(waiting)} waited {waited:.0f} s for it{_calls(waiting)}{_passes(waiting)}."
        f"{_batches(accounts)} Where rank {first.rank} is:\n{stack}"
    )


def _lines(accounts: Sequence[Account], crashes: Mapping[int, Crash] | None = None) -> str:
    """List the ranks in each call, a line a call."""
    places: dict[str, list[int]] = {}
    waits = {(each.call, each.patient) for each in accounts}
    for each in accounts:
        where = each.call or (each.stack[-1] if each.stack else "?")
        if each.call and (each.call, not each.patient) in waits:  # one line for two places
            where += f", in {_caller(each)}"
        places.setdefault(f"{where}{each.last and f', after {each.last}'}", []).append(each.rank)
    for rank, crash in sorted((crashes or {}).items()):
        where = crash.call or (crash.stack[-1] if crash.stack else "?")
        places.setdefault(where, []).append(rank)
    return "\n".join(f"    {ranks_in_words(ranks)}: {where}" for where, ranks in places.items())


def _caller(account: Account) -> str:
    """Return the frame of a rank that waits which has called what waits for others."""
    outside = [line for line in account.stack if not is_waiting_file(line.partition(":")[0]) and "/torch/" not in line]
    return (outside or account.stack)[-1]


def _behind(accounts: Sequence[Account]) -> list[Account]:
    """Return the ranks with fewer collectives than others of their stage; all of them if there is none."""
    stages: dict[int, list[Account]] = {}
    for account in accounts:
        stages.setdefault(account.pipe, []).append(account)
    behind = []
    for members in stages.values():
        counts = [(account.done, account.collectives) for account in members]
        behind += [members[i] for i, count in enumerate(counts) if count == min(counts) < max(counts)]
    return behind or list(accounts)


def who_works(accounts: Sequence[Account]) -> str:
    """Name the ranks for which others wait without a limit; empty if none does."""
    waiting = [account for account in accounts if account.patient]
    works = "; ".join(
        f"rank {account.rank} ({account.place}): {account.work or account.stack[-1]}"
        for account in accounts
        if not account.patient
    )
    if not waiting or not works:
        return ""
    waited = max(account.still for account in waiting)
    return f"{_ranks(waiting)} waited {waited:.0f} s; at work: {works}"


def _explain_disagreement(accounts: Sequence[Account], waited: float) -> str:
    """Return where each rank waits: they do not agree on what to do next."""
    lines, batches, when = _lines(accounts), _batches(accounts), _step(accounts)
    remedy = f"\n{EVERY_RANK}" if _wait_apart(accounts) else ""
    return f"all ranks have waited {waited:.0f} s for each other {when}.{batches} They wait at\n{lines}{remedy}"


def _ranks(accounts: Sequence[Account]) -> str:
    return ranks_in_words([account.rank for account in accounts])


def _calls(accounts: Sequence[Account]) -> str:
    """Return the lines of the user's program on these ranks: " at train.py:7 `save()`"; empty if unknown."""
    calls = "; ".join(sorted({account.call for account in accounts if account.call})[:REPORTED])
    return calls and f" at {calls}"


def _passes(accounts: Sequence[Account]) -> str:
    """Return the passes of a pipeline that these ranks have begun last; empty without one."""
    passes: dict[str, list[int]] = {}
    for account in accounts:
        if account.passing:
            passes.setdefault(account.passing, []).append(account.rank)
    passed = "; ".join(f"{ranks_in_words(ranks)} after {what}" for what, ranks in list(passes.items())[:REPORTED])
    return passed and f" ({passed})"


def _lone_call(accounts: Sequence[Account]) -> str:
    """Return the remedy if only some ranks made the call in which they wait for the others."""
    if not (where := _calls(accounts)):
        return ""
    who = _ranks(accounts)
    return f"Waiting{where}: {who}. Every rank has to make this call, also where `if is_main_process` keeps it out. "


def _batches(accounts: Sequence[Account]) -> str:
    batches: dict[str, list[int]] = {}
    for account in accounts:
        batches.setdefault(account.batch, []).append(account.rank)
    if len(batches) == 1:
        return ""
    reported = "; ".join(
        f"{ranks_in_words(ranks)}: {batch or 'none'}" for batch, ranks in list(batches.items())[:REPORTED]
    )
    return f" Their last batches: {reported}."
