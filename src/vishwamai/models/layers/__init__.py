"""The kinds of layers: mixers (`attention`, `latent`) and feed-forward networks (`feed_forward`, `mixture`).

`layer` puts the halves together. A further kind is one file here, and one line of each family that has it.
"""
