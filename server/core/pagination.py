"""Pages of a list, newest first: how long they may be, and where the next one begins."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from embertide.server.core.errors import invalid

PAGE_MAX = 500
_PAGE = 100
_TOKEN = re.compile(r"before-(\d{1,18})")
Item = TypeVar("Item")


class PageRequest(Protocol):
    """The fields that requests of pages have in common."""

    @property
    def page_size(self) -> int:
        """Items a page; 0: 100."""

    @property
    def page_token(self) -> str:
        """`next_token` of the page before; empty: the first page."""


class Page(NamedTuple):
    """A page, as places in the list that was asked for, and the token of the next one."""

    before: int | None
    size: int

    def cut(self, items: Iterable[Item], number: Callable[[Item], int]) -> tuple[list[Item], str]:
        """Return the page's items, and the token of the next page; empty: this is the last.

        Args:
            items: All of them, newest first.
            number: Returns the number of an item; numbers fall from one to the next.
        """
        found = [each for each in items if self.before is None or number(each) < self.before]
        more = f"before-{number(found[self.size - 1])}" if len(found) > self.size else ""
        return found[: self.size], more


def page_of(request: PageRequest) -> Page:
    """Read which page is asked for.

    Raises:
        RefusedError: The page is too long, or its token is not of ours.
    """
    if request.page_size > PAGE_MAX:
        raise invalid(f"page_size is {request.page_size}; at most {PAGE_MAX}")
    before: int | None = None
    if request.page_token:
        token = _TOKEN.fullmatch(request.page_token)
        if token is None:
            raise invalid(
                f"page_token {request.page_token[:80]!r} is not from this service; start again "
                "with an empty one"
            )
        before = int(token[1])
    return Page(before, request.page_size or _PAGE)
