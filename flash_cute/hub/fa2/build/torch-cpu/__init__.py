from flash_cute.hub.fa2 import *  # noqa: F403
