# SPDX-License-Identifier: Apache-2.0
"""`python -m tensormount`: the command."""

from tensormount._main import main

main()
