#!/bin/bash
#SBATCH --job-name=ebbtide-training
#SBATCH --nodes=4
#SBATCH --partition=gpu
#SBATCH --time=1-00:00:00
#SBATCH --gpus-per-node=8
#SBATCH --output="/home/alice/my logs/pilot-%j.log"
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --account=research
exec srun --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 \
    /opt/ebbtide/bin/python -P -m cli agent --slurm --join https://ebbtide.example --writable '/scratch/alice'"'"'s data'
