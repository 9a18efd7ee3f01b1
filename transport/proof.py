"""How a server proves to a client that its certificate is valid now, beyond the handshake.

gRPC shows a client neither its server's certificate nor its serial number, so the handshake alone
would let a revoked coordinator or syncer pass. With every call goes a challenge, and the reply
begins with a proof:

    challenge   nonce (32) | number of the client's revocation list (8)
    proof       signature length (2) | signature | certificate of the server (DER)
    signature   ECDSA-P256-SHA256 of: purpose | nonce | sha256 of the client's certificate (DER), as
                the server's end of the connection shows it

The client judges that certificate by CA, dates, role and its revocation list. The signature binds
the proof to this connection: somebody in the middle who holds a revoked server's key can end the
client's TLS and hand the challenge on, but whom the real server sees is him, not the client. A
client whose list is older than the server's is handed that one, too; it is signed by the CA.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import struct

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from transport.certificates import CertificateError, certificate_der

NONCE_BYTES = 32
_PURPOSE = b"diloco server proof 1\0"
_CHALLENGE = struct.Struct(f"<{NONCE_BYTES}sQ")
_LENGTH = struct.Struct("<H")


def make_challenge(nonce: bytes, list_number: int) -> bytes:
    """Write a challenge.

    Args:
        nonce: `NONCE_BYTES` random bytes, never used before.
        list_number: Number of the revocation list that the client has; 0: none.
    """
    return _CHALLENGE.pack(nonce, list_number)


def read_challenge(challenge: bytes) -> tuple[bytes, int]:
    """Return nonce and list number.

    Raises:
        ValueError: If it is no challenge.
    """
    if len(challenge) != _CHALLENGE.size:
        raise ValueError(f"a challenge has {_CHALLENGE.size} bytes, not {len(challenge)}")
    nonce, list_number = _CHALLENGE.unpack(challenge)
    return nonce, list_number


def make_proof(
    key: ec.EllipticCurvePrivateKey,
    certificate: x509.Certificate,
    nonce: bytes,
    client: x509.Certificate,
) -> bytes:
    """Write the proof of the server with `key` and `certificate` towards `client`."""
    signature = key.sign(_signed(nonce, client), ec.ECDSA(hashes.SHA256()))
    return _LENGTH.pack(len(signature)) + signature + certificate_der(certificate)


def read_proof(proof: bytes, nonce: bytes, client: x509.Certificate) -> x509.Certificate:
    """Return the server's certificate, which is still to be judged.

    Raises:
        CertificateError: If the server has no key to it, or answers another challenge, or sees
            another client at its end of the connection.
    """
    try:
        (size,) = _LENGTH.unpack_from(proof)
        signature = proof[_LENGTH.size : _LENGTH.size + size]
        certificate = x509.load_der_x509_certificate(proof[_LENGTH.size + size :])
    except (struct.error, ValueError) as error:
        raise CertificateError("the peer does not prove who it is") from error
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError("the peer's key is not of an elliptic curve")
    try:
        key.verify(signature, _signed(nonce, client), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise CertificateError(
            "the peer's proof is not for this connection: somebody stands between"
        ) from error
    return certificate


def _signed(nonce: bytes, client: x509.Certificate) -> bytes:
    return _PURPOSE + nonce + hashlib.sha256(certificate_der(client)).digest()
