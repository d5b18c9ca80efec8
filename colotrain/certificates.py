"""A key and its certificate that all who know a run's secret compute alike, for TLS.

The standard library speaks TLS but makes no certificates, and takes shared secrets in place of them
only since Python 3.13. So both are computed here: a private key on the curve P-256 out of the
secret, and a certificate that it signs itself. TLS, with all that must withstand an attacker, is
OpenSSL's; here nothing is computed from what somebody else has sent.
"""

from __future__ import annotations

import base64
import hmac
import os
import ssl
from functools import lru_cache
from hashlib import sha256

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int]

INTEGER, BITS, BYTES, OID, UTF8, UTC_TIME, TIME = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x17, 0x18
SEQUENCE, SET, FIRST, SECOND, FOURTH = 0x30, 0x31, 0xA0, 0xA1, 0xA3
IS_EC_KEY, IS_P256 = bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d030107")
ECDSA_WITH_SHA256 = bytes.fromhex("2a8648ce3d040302")
COMMON_NAME, BASIC_CONSTRAINTS = bytes.fromhex("550403"), bytes.fromhex("551d13")


def _number(secret: str, purpose: str) -> int:
    """Return a number from 1 to `ORDER` - 1 that only the secret and the purpose decide."""
    digest = hmac.digest(secret.encode(), purpose.encode(), "sha512")
    return int.from_bytes(digest) % (ORDER - 1) + 1


def _add(one: Point | None, other: Point | None) -> Point | None:
    """Return the sum of two points of the curve; None is the point at infinity."""
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2 and (y1 + y2) % P == 0:
        return None
    up, over = (3 * x1 * x1 - 3, 2 * y1) if x1 == x2 else (y2 - y1, x2 - x1)
    slope = up * pow(over, -1, P)
    x = (slope * slope - x1 - x2) % P
    return x, (slope * (x1 - x) - y1) % P


def _multiple(factor: int) -> Point:
    """Return the base point, added `factor` times, which is not a multiple of `ORDER`."""
    total: Point | None = None
    power: Point | None = BASE
    while factor:
        if factor & 1:
            total = _add(total, power)
        factor, power = factor >> 1, _add(power, power)
    assert total is not None
    return total


def _der(tag: int, *parts: bytes) -> bytes:
    """Return an element of ASN.1's encoding DER."""
    body = b"".join(parts)
    size = len(body)
    if size < 0x80:
        return bytes((tag, size)) + body
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + body


def _integer(value: int) -> bytes:
    return _der(INTEGER, value.to_bytes(value.bit_length() // 8 + 1))


@lru_cache(maxsize=8)
def key_and_certificate(secret: str, purpose: str) -> tuple[str, str]:
    """Return both as PEM: the same wherever and whenever, and others for another purpose.

    `ValueError` without a secret, as anybody could compute that key.
    """
    if not secret:
        raise ValueError("no secret is known")
    own = _number(secret, f"key {purpose}")
    public = _der(BITS, b"\0\4", *(value.to_bytes(32) for value in _multiple(own)))
    algorithm = _der(SEQUENCE, _der(OID, ECDSA_WITH_SHA256))
    name = _der(SEQUENCE, _der(OID, COMMON_NAME), _der(UTF8, b"colotrain"))
    name = _der(SEQUENCE, _der(SET, name))
    # clocks do not matter
    always = _der(SEQUENCE, _der(UTC_TIME, b"700101000000Z"), _der(TIME, b"99991231235959Z"))
    is_root = _der(BYTES, _der(SEQUENCE, b"\1\1\xff"))
    is_root = _der(SEQUENCE, _der(OID, BASIC_CONSTRAINTS), b"\1\1\xff", is_root)
    kind = _der(SEQUENCE, _der(OID, IS_EC_KEY), _der(OID, IS_P256))
    signed = _der(
        SEQUENCE,
        _der(FIRST, _integer(2)),
        _integer(_number(secret, f"serial {purpose}") >> 128),
        algorithm,
        name,
        always,
        name,
        _der(SEQUENCE, kind, public),
        _der(FOURTH, _der(SEQUENCE, is_root)),
    )
    # one number for two texts would tell the key
    once = _number(secret, f"once {purpose} {sha256(signed).hexdigest()}")
    r = _multiple(once)[0] % ORDER
    s = pow(once, -1, ORDER) * (int.from_bytes(sha256(signed).digest()) + r * own) % ORDER
    signature = _der(BITS, b"\0", _der(SEQUENCE, _integer(r), _integer(s)))
    certificate = _der(SEQUENCE, signed, algorithm, signature)
    key = _der(
        SEQUENCE,
        _integer(1),
        _der(BYTES, own.to_bytes(32)),
        _der(FIRST, _der(OID, IS_P256)),
        _der(SECOND, public),
    )
    text = base64.encodebytes(key).decode()
    pem = f"-----BEGIN EC PRIVATE KEY-----\n{text}-----END EC PRIVATE KEY-----\n"
    return pem, ssl.DER_cert_to_PEM_cert(certificate)


@lru_cache(maxsize=8)
def tls_context(secret: str, purpose: str, *, is_server: bool) -> ssl.SSLContext:
    """Return what speaks TLS 1.3 with those alone who know the secret, and for this purpose.

    Sessions are not resumed, so that each connection begins with both proofs.
    """
    key, certificate = key_and_certificate(secret, purpose)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # its key is known, whatever its address
    made.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        made.num_tickets = 0
    made.load_verify_locations(cadata=certificate)
    file = os.memfd_create("colotrain-key", os.MFD_CLOEXEC)  # OpenSSL reads files alone
    try:
        os.write(file, (key + certificate).encode())
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made
