"""The content store of the xet protocol: what a client that has `hf_xet` uploads to and downloads from.

A file is cut into chunks, chunks are packed into xorbs, and a shard says of which chunks a file is put together.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

# An entry of a shard: a header of a file, a segment, a verification hash or the file's own sha256.
_ENTRY = 48
_SHARD_HEADER = 48
_HAS_VERIFICATION = 1 << 31
_HAS_SHA256 = 1 << 30
_LAST_FILE = b"\xff" * 32
_CHUNK_HEADER = 8
_XORB_FOOTER = b"XETBLOB"


class Segment(NamedTuple):
    """A run of chunks of one xorb."""

    xorb: str
    size: int
    first: int
    end: int


def _hash_text(digest: bytes) -> str:
    """A xet hash as text: four little-endian words of 64 bits, each printed big-endian."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))


class XetStore:
    """Xorbs as files in `root`, shards in memory. ValueError says what is wrong with an upload."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, list[Segment]] = {}
        self.by_sha256: dict[str, str] = {}
        # Of each xorb, where its chunks begin, and where the last one ends.
        self._offsets: dict[str, list[int]] = {}

    def add_xorb(self, name: str, body: bytes) -> bool:
        """Stores a xorb; False if it was there before."""
        offsets = [0]
        while offsets[-1] + _CHUNK_HEADER <= len(body) and not body.startswith(_XORB_FOOTER, offsets[-1]):
            position = offsets[-1]
            if body[position] != 0:
                raise ValueError(f"no chunk of a known version at byte {position} of the xorb")
            offsets.append(position + _CHUNK_HEADER + int.from_bytes(body[position + 1 : position + 4], "little"))
        if offsets[-1] > len(body):
            raise ValueError("the last chunk of the xorb is cut off")
        is_new = name not in self._offsets
        (self.root / name).write_bytes(body)
        self._offsets[name] = offsets
        return is_new

    def add_shard(self, body: bytes) -> None:
        """Learns the files that a shard describes."""
        position = _SHARD_HEADER
        while True:
            digest = body[position : position + 32]
            flags, count = struct.unpack_from("<II", body, position + 32)
            position += _ENTRY
            if digest == _LAST_FILE:
                return
            segments = [self._read_segment(body, position + number * _ENTRY) for number in range(count)]
            position += count * _ENTRY * (2 if flags & _HAS_VERIFICATION else 1)
            self.files[_hash_text(digest)] = segments
            if flags & _HAS_SHA256:
                self.by_sha256[_hash_text(body[position : position + 32])] = _hash_text(digest)
                position += _ENTRY

    def _read_segment(self, body: bytes, position: int) -> Segment:
        segment = Segment(_hash_text(body[position : position + 32]), *struct.unpack_from("<III", body, position + 36))
        if segment.xorb not in self._offsets:
            raise ValueError(f"the shard names the xorb {segment.xorb}, which was never uploaded")
        return segment

    def size(self, name: str) -> int:
        """How many bytes a file has."""
        return sum(segment.size for segment in self.files[name])

    def reconstruction(self, name: str, address: str, start: int, stop: int) -> dict[str, Any]:
        """Where to fetch the segments that hold the bytes `start` to `stop` of a file, both included.

        Segments come whole, and the client drops the bytes in front of `start`.
        """
        terms: list[dict[str, Any]] = []
        sources: dict[str, list[dict[str, Any]]] = {}
        skipped = position = 0
        for segment in self.files[name]:
            if position <= stop and position + segment.size > start:
                skipped = skipped if terms else max(0, start - position)
                chunks = {"start": segment.first, "end": segment.end}
                offsets = self._offsets[segment.xorb]
                stored = {"start": offsets[segment.first], "end": offsets[segment.end] - 1}
                source = {"range": chunks, "url": f"{address}/{segment.xorb}", "url_range": stored}
                terms.append({"hash": segment.xorb, "unpacked_length": segment.size, "range": chunks})
                if source not in sources.setdefault(segment.xorb, []):
                    sources[segment.xorb].append(source)
            position += segment.size
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": sources}
