"""In what a file that is not the canonical archive of its index differs from it, in words.

By the time this runs the file is refused; what is found here only says why. So it may look at what headers say about
themselves, which nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernelbake import archive
from kernelbake.archive import BLOCK, TRAILER
from kernelbake.members import Source, Span, limit_of
from kernelbake.rules import MAX_VIOLATIONS, Findings, Rule
from kernelbake.words import counted


def compare_header(block: bytes, wanted: bytes, name: str, findings: Findings) -> None:
    fields = archive.differing_fields(block, wanted)
    if fields:
        message = f"its header differs in {', '.join(fields)}; wanted the canonical one"
        findings.add(Rule.HEADER_BYTES, f"`{name}`", message)


def describe(source: Source, spans: Mapping[str, Span], time: int, findings: Findings) -> None:
    """Says how a file that is not the canonical archive differs from it (MUST 4 to 10, 18 and 19)."""
    walk = _Walk(source, spans, time, findings)
    while walk.step():
        pass
    walk.finish()


class _Walk:
    """Goes from header to header of a file that is known to be wrong."""

    def __init__(self, source: Source, spans: Mapping[str, Span], time: int, findings: Findings) -> None:
        self.source, self.spans, self.time, self.findings = source, spans, time, findings
        self.offset = 0
        self.seen: list[str] = []
        self.known: set[str] = set()

    def step(self) -> bool:
        """Describes the member at the offset and goes to the next; False at the end."""
        block = self.source.at(self.offset, BLOCK)
        if len(block) < BLOCK:
            self._stop(f"the file ends at byte {self.source.size} without a trailer; wanted two zero blocks")
            return False
        if not any(block):
            self._check_trailer()
            return False
        found = archive.parse(block)
        if not found.intact or found.size is None:
            return self._step_over_damage()
        self._check_member(found)
        span = self.spans.get(found.name)
        if span is not None and found.name not in self.known:
            self._check_listed(block, found, span)
        self.seen.append(found.name)
        self.known.add(found.name)
        self.offset += BLOCK + archive.padded(found.size)
        if self.offset > self.source.size:
            message = f"the file ends inside it, after {counted(self.source.size, 'byte')}; wanted all of it"
            self.findings.add(Rule.TRAILER, f"`{found.name:.100}`", message)
            return False
        return not self.findings.full and len(self.seen) < len(self.spans) + MAX_VIOLATIONS

    def _step_over_damage(self) -> bool:
        """A damaged header: named by the member that belongs here, if one does, and passed over."""
        for name, span in self.spans.items():
            if span.offset == self.offset + BLOCK:
                wanted = archive.header(name, span.size, self.time)
                compare_header(self.source.at(self.offset, BLOCK), wanted, name, self.findings)
                self.seen.append(name)
                self.known.add(name)
                self.offset = span.offset + archive.padded(span.size)
                return True
        message = "no header of a member; wanted one, or the trailer of two zero blocks"
        self.findings.add(Rule.HEADER_BYTES, f"byte {self.offset}", message)
        return False

    def _check_member(self, found: archive.Found) -> None:
        place = f"`{found.name:.100}`"
        if found.kind is not None:
            self.findings.add(Rule.MEMBER_TYPE, place, f"{found.kind}; wanted a regular file")
        if limit_of(found.name) is None:
            self.findings.add(Rule.MEMBER_NAME, place, "no name that the format knows; wanted one that it does")
        if found.name in self.known:
            self.findings.add(Rule.UNIQUE, place, "a second member of this name; wanted one")
        elif found.name not in self.spans:
            self.findings.add(Rule.LISTED, place, "a member that the index does not list; wanted only listed ones")

    def _check_listed(self, block: bytes, found: archive.Found, span: Span) -> None:
        assert found.size is not None, "a header without a size is damaged, and passed over"
        place = f"`{found.name}`"
        if found.size != span.size:
            self.findings.add(
                Rule.SIZE, place, f"{counted(found.size, 'byte')}; wanted {span.size:,}, as the index says"
            )
            return
        compare_header(block, archive.header(found.name, span.size, self.time), found.name, self.findings)
        padding = -span.size % BLOCK
        stop = self.offset + BLOCK + span.size
        if self.source.at(stop, padding).strip(b"\0"):
            self.findings.add(Rule.PADDING, place, f"padding after byte {stop} that is not zero; wanted zeros")

    def _check_trailer(self) -> None:
        rest = self.source.size - self.offset
        if rest != len(TRAILER) or self.source.at(self.offset, rest) != TRAILER:
            self._stop(f"{counted(rest, 'byte')} after the last member; wanted two zero blocks and the end of the file")

    def _stop(self, message: str) -> None:
        self.findings.add(Rule.TRAILER, f"byte {self.offset}", message)

    def finish(self) -> None:
        """What is missing and what stands in another order."""
        wanted = list(self.spans)
        for name in wanted:
            if name not in self.known:
                self.findings.add(
                    Rule.LISTED, f"`{name}`", "listed in the index, not found in the archive; wanted both"
                )
        listed = [name for name in self.seen if name in self.spans]
        for mine, other in zip(listed, (name for name in wanted if name in self.known), strict=False):
            if mine != other:
                self.findings.add(Rule.ORDER, f"`{mine}`", f"it stands where `{other}` belongs; wanted sorted members")
                break
        if not self.findings:
            self.findings.add(Rule.HEADER_BYTES, "file", "not the canonical archive of its index; wanted that")
