"""What transformers' Trainer must be told of the experts: imported only when asked for, as lrmoe.TrainerCallback."""

import os

import transformers

from .attachment import gather


class TrainerCallback(transformers.TrainerCallback):
    """Saves and resumes the experts with the Trainer's own checkpoints.

        model = ...; lrmoe.attach(model, worker)
        optimizer = lrmoe.JointOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), lrmoe.AdamW(worker, lr=lr), max_norm=1.0)
        Trainer(model, args, optimizers=(optimizer, schedule), callbacks=[lrmoe.TrainerCallback(model, worker)])

    Before the Trainer saves, the trained experts are gathered on rank 0, so that checkpoint-N opens without lrmoe; masters
    and moments of all ranks go to checkpoint-N/experts. When training resumes they come back from there, on the same or
    another number of ranks. `args.max_grad_norm` must be 0: the JointOptimizer clips dense parameters and experts together.
    Saving on a step or epoch works, save_strategy "best" does not: nobody is told of it in time.

    model: the attached model, not its wrapper. resume_from: the checkpoint folder given to Trainer.train, when it is not
    output_dir/checkpoint-N."""

    def __init__(self, model, worker, resume_from=None):
        self._model, self._worker, self._resume_from = model, worker, resume_from

    def on_train_begin(self, args, state, control, **kwargs):
        if args.max_grad_norm:
            raise ValueError(f"max_grad_norm: {args.max_grad_norm} clips dense parameters alone; set it to 0 and give max_norm "
                             "to lrmoe.JointOptimizer")
        if state.global_step > 0:
            folder = self._resume_from or self._checkpoint(args, state)
            self._worker.load_checkpoint(os.path.join(folder, "experts"), state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save:
            gather(self._model, ranks=[0])

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._worker.save_checkpoint(os.path.join(self._checkpoint(args, state), "experts"), state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        gather(self._model, ranks=[0])  # for Trainer.save_model

    @staticmethod
    def _checkpoint(args, state):
        return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
