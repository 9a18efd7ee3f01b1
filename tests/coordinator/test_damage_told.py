"""What the coordinator has of a damaged fragment: how many versions there were, what it shows."""

from __future__ import annotations

from pathlib import Path

from diloco.coordinator.grants import sign
from protos import control_pb2 as control
from tests.coordinator_desk import SECRET, Desk, joined, tell
from transport.contracts import PROTOCOL_VERSION


def test_a_syncer_hears_how_many_versions_are_indexed(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def num_indexed() -> list[int]:
            grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
            request = control.SyncerHelloRequest(protocol_version=PROTOCOL_VERSION, grant=grant)
            reply = await desk.call("syncer_hello", request)
            return list(control.SyncerHelloReply.FromString(reply).num_indexed)

        assert await num_indexed() == [], "no plan yet"
        await joined(desk)
        assert await num_indexed() == [0, 0]
        for version in (0, 1, 2):
            header = {"timeline": 0, "fragment_id": 1, "version": version}
            await desk.round_report(record=header)
        assert await num_indexed() == [0, 3]
        await desk.restart()
        assert await num_indexed() == [0, 3]

    tell(tmp_path, story)


def test_the_status_says_which_fragment_is_not_served(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await joined(desk)
        damage = "fragment 1 is damaged and not served: diloco repair RUN.toml"
        fragments = [
            control.FragmentStatus(fragment_id=0, phase="open"),
            control.FragmentStatus(fragment_id=1, phase="damaged", damage=damage),
        ]
        await desk.round_report(fragments=fragments)

        status = desk.coordinator.status()
        assert status.message == damage
        assert [fragment.phase for fragment in status.fragments] == ["open", "damaged"]
        fragments[1].damage = ""
        await desk.round_report(fragments=fragments)
        assert desk.coordinator.status().message == ""

    tell(tmp_path, story)
