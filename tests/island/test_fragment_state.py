"""What a rank takes of its syncer's announcements of one fragment."""

from __future__ import annotations

from diloco.island.exchange.fragment_state import IslandFragment
from diloco.protos import fragment_pb2 as wire


def test_lists_are_kept_of_the_very_version_that_the_syncer_does_not_repeat() -> None:
    fragment = IslandFragment(0, lanes=())
    told = wire.FragmentState(is_founded=True, version=3, digest=b"d", contributors=["east"])
    told.lane_digests.append(b"lane")
    fragment.on_announcement(told)

    for version, digest, is_same in [(3, b"d", True), (4, b"d", False), (5, b"e", False)]:
        state = wire.FragmentState(is_founded=True, version=version, digest=digest)
        fragment.on_announcement(state)
        assert list(fragment.state.lane_digests) == [b"lane"] * is_same
        assert list(fragment.state.contributors) == ["east"] * is_same
