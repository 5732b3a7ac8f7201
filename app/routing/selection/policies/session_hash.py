"""Policy session_hash: always the same place for a session, else for the request id."""

from __future__ import annotations

from hashlib import blake2b

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import random_shares
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig


class SessionHash(Policy):
    """Policy session_hash: rendezvous hashing, so a lost place loses only its own sessions."""

    name = "session_hash"
    reason = "by the hash of its session id, or of its request id without one"
    summary = "the same worker for a session (else for a request id), while it is alive"
    uses_sessions = True

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        name = blake2b((features.session or features.id).encode(), digest_size=8).digest()
        return Scores(random_shares(int.from_bytes(name, "little"), options.hashes))


POLICY = SessionHash()
