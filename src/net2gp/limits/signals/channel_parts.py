"""Parts of the channels of a signal, as expressions of their own."""

from __future__ import annotations

from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression


def rows(e: Expression, first: int, last: int) -> Expression:
    """Return the channels from `first` to before `last` of a signal.

    Weights get `rows`, so that other channels of the same signal come out independent of these.
    """
    match e:
        case ex.Weighted() | ex.Parameter():
            start = e.rows[0] if e.rows else 0
            return _changed(e, rows=(start + first, start + last))
        case ex.Raw():
            return _changed(e, first=e.first + first, last=e.first + last)
        case ex.Sum():
            return ex.Sum(tuple((c, rows(t, first, last)) for c, t in e.terms), e.positions)
        case ex.Attended() | ex.RandomlyAttended():
            return _changed(e, value=rows(e.value, first, last), part=_part(e, first, last))
        case ex.Normalized():
            return _changed(e, input=rows(e.input, first, last), part=_part(e, first, last))
        case ex.Dropped():
            start = e.span[0] if e.span else 0
            span = (start + first, start + last)
            return _changed(e, input=rows(e.input, first, last), span=span)
        case ex.Product():
            return ex.Product(rows(e.left, first, last), rows(e.right, first, last), e.positions)
        case _:
            return _changed(e, input=rows(e.input, first, last))


def _part(e: ex.Attended | ex.RandomlyAttended | ex.Normalized, first: int, last: int) -> ex.Part:
    if e.part is None:
        return ex.Part(e, first, last)
    return ex.Part(e.part.whole, e.part.first + first, e.part.first + last)


def _changed(e: Expression, **fields: object) -> Expression:
    # a new expression gets an order of its own, which must be larger than the orders of its parts
    values = {name: getattr(e, name) for name in e.__dataclass_fields__ if name != "order"}
    return type(e)(**{**values, **fields})
