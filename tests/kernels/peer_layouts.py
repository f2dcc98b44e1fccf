"""Decoders of peers' memory layouts, written from the hardware's side and slow on purpose: one thread after the other.

Source: the PTX ISA's fragment layout of mma.m16n8k16 for 16-bit B operands (thread t holds column t / 4; its first
register rows 2 (t % 4) and the next, its second register eight rows further), and how Marlin feeds it: 16 x 64 tiles, a
16-byte load per thread, four words for four blocks of 16 columns, in each word the pairs of nibbles 16 bits apart.
"""

import torch


def marlin_codes(words: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, K] from Marlin's int32 words [K / 16, 2 N]."""
    k_tiles, width = words.shape
    n = width // 2
    unsigned = (words.long() & 0xFFFFFFFF).numpy()  # of which an element is read in a tenth of a tensor's time
    filled = torch.full((n, 16 * k_tiles), 255, dtype=torch.uint8)
    codes = filled.numpy()
    for k_tile in range(k_tiles):
        for n_tile in range(n // 64):
            for thread in range(32):
                for word in range(4):
                    bits = int(unsigned[k_tile, (n_tile * 32 + thread) * 4 + word])
                    for register in range(4):  # two registers of the first 8 columns, two of the next 8
                        pair = (bits >> (4 * register)) & 0x000F000F
                        column = n_tile * 64 + word * 16 + (register // 2) * 8 + thread // 4
                        row = k_tile * 16 + 2 * (thread % 4) + 8 * (register % 2)
                        codes[column, row], codes[column, row + 1] = pair & 15, pair >> 16
    return filled


def marlin_scales(packed: torch.Tensor) -> torch.Tensor:
    """float64 scales [N, K / 16] from Marlin's S0E5M3 bytes [K / 16, N], without its factor of 2^7."""
    data = packed.view(torch.uint8).numpy()
    blocks, n = data.shape
    values = torch.full((n, blocks), float("nan"), dtype=torch.float64)
    order = {0: 0, 2: 1, 1: 2, 3: 3}  # within four blocks of 8 columns: the even ones first
    for block in range(blocks):
        for column in range(n):
            tile, within = divmod(column, 64)
            eighth, lane = divmod(within, 8)
            byte = int(data[block, tile * 64 + lane * 8 + eighth // 4 * 4 + order[eighth % 4]])
            assert byte == 0 or byte >= 128, "the first exponent bit must be set"
            values[column, block] = 0.0 if byte == 0 else 2.0 ** ((byte >> 3) - 15 - 7) * (1 + (byte & 7) / 8)
    return values
