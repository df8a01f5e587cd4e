#!/bin/bash
# The folder of wheels that gpu.py needs to run TRL itself on a machine without a network. Here, where pip has an index:
#     bash benchmarks/carry_trl.sh wheels          # trl, datasets, dill, multiprocess: 2 MB; pyarrow, pandas from the image
#     bash benchmarks/carry_trl.sh wheels --all    # with what these need as well (70 MB), for the Python that runs this
# There, gpu.py --wheels wheels does this itself, into a folder of its own, so that nothing of the machine is replaced:
#     pip install --no-index --no-deps --find-links wheels --target somewhere trl datasets dill multiprocess
set -euo pipefail
folder=${1:?which folder}
packages=(trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19)
if [ "${2:-}" = --all ]; then
    packages+=(pyarrow pandas xxhash)
fi
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$folder" "${packages[@]}"
du -sh "$folder"
