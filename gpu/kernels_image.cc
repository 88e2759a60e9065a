// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, as bytes of the library: the assembler takes them from the file that nvcc
// made (CMakeLists.txt).
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    ".global tensormount_kernels_begin\n"
    ".hidden tensormount_kernels_begin\n"
    "tensormount_kernels_begin:\n"
    ".incbin \"" TENSORMOUNT_KERNELS_FILE
    "\"\n"
    ".global tensormount_kernels_end\n"
    ".hidden tensormount_kernels_end\n"
    "tensormount_kernels_end:\n"
    ".byte 0\n"
    ".popsection\n");
